"""Rows of the one table, and what is asked of some of them; arithmetic only, no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["HEADER", "Goal", "Row", "cells"]

HEADER = (
    "what is copied",
    "plain copy GB/s",
    "kvferry GB/s",
    "of plain",
    "by kernel GB/s",
    "by engine GB/s",
    "torch of plain",
    "per-block loop of plain",
    "µs to enqueue",
)


@dataclass(frozen=True)
class Row:
    """One copy: bytes per second by contestant, not a number where it could not be measured."""

    what: str
    plain: float
    kvferry: float
    kernel: float | None = None
    engine: float | None = None
    torch: float | None = None
    loop: float | None = None
    # Seconds of the host in which kvferry's call returns.
    enqueue: float | None = None
    # Name of what this row is held to.
    goal: str = ""

    @property
    def of_plain(self) -> float:
        return self.kvferry / self.plain


@dataclass(frozen=True)
class Goal:
    """What all rows that name it are held to: a share of a plain copy, or a time to enqueue."""

    name: str
    what: str
    least_of_plain: float | None = None
    most_enqueue: float | None = None

    def verdict(self, rows: Iterable[Row]) -> str:
        """Return a line with what is asked, what the worst row has, and whether that will do."""
        held = [row for row in rows if row.goal == self.name]
        if self.least_of_plain is not None:
            asked = f"{self.what}: at least {self.least_of_plain} of a plain copy"
            worst = min((row.of_plain for row in held), key=_worse_first, default=math.nan)
            shown, holds = f"{worst:.3f}", worst >= self.least_of_plain
        else:
            asked = f"{self.what}: enqueued in less than {self.most_enqueue * 1e6:.0f} µs"
            worst = max((row.enqueue for row in held), default=math.nan)
            shown, holds = f"{worst * 1e6:.1f} µs", worst < self.most_enqueue
        if math.isnan(worst):
            return f"- {asked}; not measured"
        return f"- {asked}; {shown}, {'holds' if holds else 'MISSED'}"


def _worse_first(share: float) -> float:
    """Order shares so that one that could not be measured comes before any other."""
    return -math.inf if math.isnan(share) else share


def cells(row: Row) -> list[str]:
    """Return a row as the table shows it; a dash says that there was nothing to be had."""

    def shown(figure: float | None, form: str) -> str:
        if figure is None:
            return ""
        return "–" if math.isnan(figure) else format(figure, form)

    def speed(rate: float | None) -> str:
        return shown(rate and rate / 1e9, ",.1f")

    def share(rate: float | None) -> str:
        return shown(rate and rate / row.plain, ".3f")

    return [
        row.what,
        speed(row.plain),
        speed(row.kvferry),
        share(row.kvferry),
        speed(row.kernel),
        speed(row.engine),
        share(row.torch),
        share(row.loop),
        shown(row.enqueue and row.enqueue * 1e6, ",.1f"),
    ]
