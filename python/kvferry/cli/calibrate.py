"""The bus to a GPU: two ways by the size of fragments, and the variables that choose one."""

from __future__ import annotations

import argparse

from kvferry._words import size
from kvferry.cuda import Calibration, calibrate

COLUMNS = ("GB/s", "up by kernel", "by engine", "down by kernel", "by engine")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print what was found; return the exit code."""
    print(report(calibrate(arguments.device)))
    return 0


def report(calibration: Calibration) -> str:
    """Return a table of speeds, and lines for a shell."""
    upload, download = calibration.upload, calibration.download
    rows: list[tuple[str, ...]] = [COLUMNS]
    for up, down in zip(upload.fragments, download.fragments, strict=True):
        speeds = (up.kernel, up.engine, down.kernel, down.engine)
        rows.append((size(up.num_bytes), *(f"{speed / 1e9:.2f}" for speed in speeds)))
    plain = (f"{bus.plain / 1e9:.2f}" for bus in (upload, download))
    rows.append(("contiguous", "", next(plain), "", next(plain)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    exports = [f"export {name}={value}" for name, value in calibration.thresholds().items()]
    return "\n".join([*lines, "", *exports])
