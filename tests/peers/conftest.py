"""Collects the tests beside the systems that are installed in this environment.

Each system has an environment of its own: `make test-peers` gets both, and runs pytest in either.
"""

from __future__ import annotations

from importlib.util import find_spec

SYSTEMS = ("lmcache", "vllm")
collect_ignore = [system for system in SYSTEMS if find_spec(system) is None]


def pytest_report_header():
    here = [system for system in SYSTEMS if system not in collect_ignore]
    if not here:
        return f"peers: neither {' nor '.join(SYSTEMS)} is here; `make test-peers` gets both"
    return f"peers: this run is beside {' and '.join(here)}; each system has a run of its own"
