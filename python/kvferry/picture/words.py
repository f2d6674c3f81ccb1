"""How a picture names heads, ranks and what a rank pair moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.picture import svg
from kvferry.plan import Explanation, GroupExplanation, TransferExplanation

__all__ = ["band_words", "held_words", "pair_words", "rank_words"]


def band_words(group: GroupExplanation, one: TransferExplanation) -> str:
    """Name what a transfer moves: its units, and its layers where these are not all."""
    words = held_words(group.kind, [one])
    if one.num_layers != group.num_layers:
        words += f" of {svg.counted(one.num_layers, 'layer')}"
    return words


def pair_words(explanation: Explanation, one: TransferExplanation) -> str:
    """Say what a transfer's rank pair moves, in all of its transfers."""
    ends = (one.source_rank, one.target_rank)
    shared = [t for t in explanation.transfers if (t.source_rank, t.target_rank) == ends]
    for pair in explanation.pairs:
        if (pair.source_rank, pair.target_rank) == ends:
            fragments = svg.counted(pair.num_fragments, "fragment")
            in_all = " in all" if len(shared) > 1 else ""
            return f"{svg.size(pair.num_bytes)} in {fragments}{in_all}"
    return ""


def held_words(kind: str, transfers: Iterable[TransferExplanation]) -> str:
    """Name all units that a rank takes part with; those of a state within their part."""
    by_planes: dict[tuple[str, ...], set[tuple[int, int]]] = {}
    for one in transfers:
        by_planes.setdefault(one.planes, set()).add(one.units)
    named = (
        _unit_words(kind, planes, _merged(sorted(units))) for planes, units in by_planes.items()
    )
    return ", ".join(named)


def rank_words(ranks: Sequence[int]) -> str:
    """Name several ranks."""
    intervals = _merged((rank, rank + 1) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(map(_interval_words, intervals))


def _unit_words(kind: str, planes: Sequence[str], intervals: Sequence[tuple[int, int]]) -> str:
    if kind == "latent":
        return "latent"
    words = ", ".join(map(_interval_words, intervals))
    if kind == "state":
        return f"{planes[0]} {words}"
    several = sum(end - begin for begin, end in intervals) > 1
    return f"head{'s' if several else ''} {words}"


def _interval_words(interval: tuple[int, int]) -> str:
    begin, last = interval[0], interval[1] - 1
    return f"{begin}" if begin == last else f"{begin}–{last}"


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted intervals that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for begin, end in intervals:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
