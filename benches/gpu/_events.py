"""What the scripts here share: time on the device's own clock, by contestants that take turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from _measure import print_table

__all__ = ["STREAM", "device_seconds", "permutation", "print_table"]

# Not a default stream, so that the copy engine takes batches.
STREAM = torch.cuda.Stream()
# The device waits so long before what is measured, until all of it has been enqueued.
AHEAD_CYCLES = 10_000_000


def device_seconds(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int = 9
) -> dict[str, float]:
    """Return the median seconds that each contestant's work takes on `STREAM`.

    A first round, not counted, warms them up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_index in range(rounds + 1):
        for name, run in contestants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(STREAM):
                torch.cuda._sleep(AHEAD_CYCLES)
                begin.record()
                run()
                end.record()
            STREAM.synchronize()
            if round_index > 0:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in seconds.items()}


def permutation(count: int, seed: int) -> torch.Tensor:
    """Return all ids below `count` in random order, on the host."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
