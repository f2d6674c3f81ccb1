"""The one table of what kvferry is worth on this machine's GPU, and what is asked of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import on_device
import over_bus
import torch
from _events import warm_up
from _rows import HEADER, Goal, Row, cells

from kvferry import cuda

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from _measure import print_heading, print_table

NOTE = (
    "Every byte counts once. Times are the device's: all of a round has been enqueued before it "
    "begins. Each round has new block ids, whose tables are uploaded in it; torch's lie on the "
    "device. `plain` is one contiguous copy of as many bytes, `torch` is index_select and "
    "index_copy_, with permute between layouts, and the loop is a cuMemcpyAsync for each block. "
    "Fragments over the bus go the way that the thresholds below choose; their times are from the "
    "call to the last byte. `–`: not measured, for the driver's queue was full"
)
GOALS = (
    Goal("device", "gather, scatter and both on the device, 64 KiB blocks", least_of_plain=0.9),
    Goal("relayout", "re-layout with heads of 256 bytes", least_of_plain=0.8),
    Goal("bus", "large blocks between host and device", least_of_plain=0.95),
    Goal("overhead", "new plans", most_enqueue=20e-6),
)


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """Tell of each row as it is measured, in case the rest never is."""
    for row in rows:
        print(f"{row.what}: {row.of_plain:.2f} of plain", file=sys.stderr, flush=True)
        yield row


def main() -> None:
    warm_up()
    rows = list(told(on_device.rows()))
    measured = cuda.calibrate()
    rows += told(over_bus.rows(measured))
    print_heading(torch.cuda.get_device_name(), NOTE)
    print_table(HEADER, [cells(row) for row in rows])
    print("Suggested thresholds:\n")
    for variable, value in measured.thresholds().items():
        print(f"- {variable}={value}")
    print("\nAsked of an H200, and what the worst row has:\n")
    for goal in GOALS:
        print(goal.verdict(rows))


if __name__ == "__main__":
    main()
