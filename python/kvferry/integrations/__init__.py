"""What kvferry does, under the names of the systems whose programs move to it.

`kvferry.integrations.lmcache` stands in for LMCache's module on engine groups,
`kvferry.integrations.vllm` for vLLM's module of helpers for connectors. Replacing the import is
the whole migration; neither imports the system that it stands in for.
"""
