"""Time on the device's own clock, by contestants that take turns; ends where there is no GPU."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvferry import cuda

__all__ = ["STREAM", "Timing", "take_turns", "warm_up"]

if reason := cuda.unavailable_reason() or (
    None if torch.cuda.is_available() else "this torch has no CUDA"
):
    sys.exit(f"nothing to measure: {reason}")

# Not a default stream, so that the copy engine takes batches.
STREAM = torch.cuda.Stream()
# No device's clock is faster by much; a slower one sleeps longer, which is no harm.
FASTEST_HERTZ = 2e9
# The device sleeps for twice what the host needed to enqueue the same before, within these bounds.
# At the upper one the driver's queue is full, and waits for the device whatever it does.
LEAST_AHEAD_SECONDS, MOST_AHEAD_SECONDS = 1e-3, 0.1


def warm_up(seconds: float = 0.5) -> None:
    """Keep the device busy until its clocks have risen."""
    one, two = (torch.zeros(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        two.copy_(one)
        torch.cuda.synchronize()


@dataclass
class Timing:
    """The rounds of one contestant."""

    on_device: list[float] = field(default_factory=list)
    on_host: list[float] = field(default_factory=list)
    ahead_seconds: float = LEAST_AHEAD_SECONDS

    def add(self, on_device: float, on_host: float, *, was_ahead: bool) -> None:
        """Take a round; a device that had begun before all was enqueued has waited for the host."""
        self.on_host.append(on_host)
        if was_ahead:
            self.on_device.append(on_device)

    def adapt(self, on_host: float) -> None:
        """Let the device sleep long enough for a host that takes so long."""
        self.ahead_seconds = min(MOST_AHEAD_SECONDS, max(self.ahead_seconds, 2 * on_host))

    @property
    def seconds(self) -> float:
        """Of the device, not a number where too few rounds count."""
        counts = 2 * len(self.on_device) >= len(self.on_host) > 0
        return statistics.median(self.on_device) if counts else float("nan")

    @property
    def enqueue_seconds(self) -> float:
        """Of the host, until the call has returned."""
        return statistics.median(self.on_host)


def take_turns(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int = 9
) -> dict[str, Timing]:
    """Measure what each contestant enqueues on `STREAM`, behind a sleep of the device.

    The sleep outlasts the enqueueing, so that no time of the device is spent waiting for the host;
    a round in which it did not does not count. Before the rounds, one warms up, and one tells how
    long to sleep.
    """
    timings = {name: Timing() for name in contestants}
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        for round_index in range(-2, rounds):
            for name, enqueue in contestants.items():
                timing = timings[name]
                on_device, on_host, was_ahead = _round(enqueue, timing.ahead_seconds)
                if round_index > -2:
                    timing.adapt(on_host)
                if round_index >= 0:
                    timing.add(on_device, on_host, was_ahead=was_ahead)
    finally:
        gc.enable()
    return timings


def _round(enqueue: Callable[[], object], ahead_seconds: float) -> tuple[float, float, bool]:
    """Return seconds of the device and of the host; and whether the device slept meanwhile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(STREAM):
        torch.cuda._sleep(int(ahead_seconds * FASTEST_HERTZ))
        begin.record()
        before = time.perf_counter()
        enqueue()
        on_host = time.perf_counter() - before
        end.record()
        was_ahead = not begin.query()
    STREAM.synchronize()
    return begin.elapsed_time(end) / 1e3, on_host, was_ahead
