"""What kvferry does, under the names of the systems whose programs move to it.

`kvferry.integrations.lmcache` stands in for LMCache's module on engine groups,
`kvferry.integrations.vllm` for vLLM's module of helpers for connectors. Programs replace the
import; docs/migrate.md says what differs, and what a user of vLLM 0.32 does besides. Neither module
imports the system that it stands in for.
"""
