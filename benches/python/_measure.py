"""What the scripts here share: contestants that take turns, medians, and tables in Markdown."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def medians(contestants: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Return the median seconds of each contestant.

    They take turns, there and back, so that whatever else the machine does hits them alike and
    nobody always finds the caches as the same other one has left them. A first round, not counted,
    warms them up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    forwards = list(contestants.items())
    gc.collect()
    gc.disable()
    try:
        for round_index in range(rounds + 1):
            turns = forwards if round_index % 2 == 0 else forwards[::-1]
            for name, run in turns:
                begin = time.perf_counter()
                result = run()
                elapsed = time.perf_counter() - begin
                del result  # giving it back is not measured
                if round_index > 0:
                    seconds[name].append(elapsed)
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in seconds.items()}


def print_heading(title: str, note: str) -> None:
    """Print what is measured, and how."""
    print(f"## {title}\n\n{note}.\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; the first column is text, the others are figures."""
    lines = [header, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for first, *figures in (header, rule, *rows):
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        print("| " + " | ".join([first.ljust(widths[0]), *cells]) + " |")
    print()
