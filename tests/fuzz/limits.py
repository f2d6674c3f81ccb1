"""How long to search, and how much memory one call may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

EXAMPLES = int(os.environ.get("KVFERRY_FUZZ_EXAMPLES", "200"))
# Far below what one length that is believed would take; some way above what the bounds allow.
MAX_GROWTH_KIB = 64 << 10


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Assert that what runs inside hardly raises this process's peak."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < MAX_GROWTH_KIB, f"the peak has grown by {grown} KiB"
