"""The upper half of a group's picture: bands of heads between the ranks of both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.picture import svg
from kvferry.picture.svg import Panel
from kvferry.picture.words import band_words, held_words, pair_words, rank_words
from kvferry.plan import Explanation, GroupExplanation, TransferExplanation

__all__ = ["draw"]

# What stays readable at the width of a page; the rest is counted.
MAX_BANDS = 12
BOX_WIDTH, BOX_GAP, MIN_HUB_HEIGHT = 168.0, 8.0, 52.0
# Of one unit, and of the widest band.
UNIT_HEIGHT, MAX_BAND_HEIGHT = 17.0, 56.0
BAND_GAP = 2.0
# Narrower ones would be a blur.
MIN_CELL_HEIGHT = 4.0
CELL_WIDTH = 8.0
ROW_HEIGHT, HIDDEN_HEIGHT, HEAD_HEIGHT = 40.0, 16.0, 20.0
TEXT_SIZE = 12.0
# Bands run straight as far as most labels reach.
STRAIGHT_WIDTH, MAX_LABEL_WIDTH, LABEL_INDENT = 320.0, 420.0, 12.0
COLOURS = ("#4c78c9", "#3a9d9d", "#7d6bc4", "#4f9bd9")
BOX_EDGE = "#8c959f"


class Band(NamedTuple):
    """One transfer and its label."""

    transfer: TransferExplanation
    label: tuple[str, str]

    @property
    def height(self) -> float:
        """Thickness, by the number of units."""
        begin, end = self.transfer.units
        return min((end - begin) * UNIT_HEIGHT, MAX_BAND_HEIGHT)


class Spoke(NamedTuple):
    """A rank that the hub moves something with."""

    rank: int
    bands: list[Band]

    @property
    def height(self) -> float:
        """Of its box."""
        return sum(_row_height(band) for band in self.bands)


class Fan(NamedTuple):
    """The hub, which is the rank that the plan is for, and the ranks around it."""

    kind: str
    hub: int
    hub_is_target: bool
    hub_holds: str
    spokes: list[Spoke]
    num_hidden: int
    notified: Sequence[int]

    @property
    def edges(self) -> tuple[float, float]:
        """Where bands leave the spokes' boxes, and where they meet the hub's."""
        left = svg.PADDING + BOX_WIDTH
        edges = (left, svg.INNER_WIDTH - left)
        return edges if self.hub_is_target else edges[::-1]

    @property
    def step(self) -> int:
        """Which way bands run from spokes to the hub."""
        return 1 if self.hub_is_target else -1

    @property
    def bands(self) -> list[Band]:
        """Bands of all spokes, top to bottom."""
        return [band for spoke in self.spokes for band in spoke.bands]

    @property
    def bands_height(self) -> float:
        """What all bands take side by side, at the hub."""
        return sum(band.height + BAND_GAP for band in self.bands)

    @property
    def hub_height(self) -> float:
        """Of the hub's box."""
        return max(self.bands_height + 14, MIN_HUB_HEIGHT)

    @property
    def spokes_height(self) -> float:
        """Of all boxes that face the hub."""
        heights = [spoke.height for spoke in self.spokes]
        heights += [HIDDEN_HEIGHT] * bool(self.num_hidden) + [ROW_HEIGHT] * bool(self.notified)
        return sum(heights) + BOX_GAP * (len(heights) - 1)


def draw(explanation: Explanation, group: GroupExplanation, notified: Sequence[int]) -> Panel:
    """Draw the ranks that take part in one group pair, and those that are only notified."""
    fan = _fan(explanation, group, notified)
    if not fan.spokes and not notified:
        note = "This rank moves nothing of this group."
        return Panel([svg.text(svg.PADDING, 10, note, size=TEXT_SIZE, fill=svg.FAINT)], 26)
    height = max(fan.spokes_height, fan.hub_height)
    hub_top = HEAD_HEIGHT + (height - fan.hub_height) / 2
    parts = _column_heads(explanation)
    parts += _spokes(fan, HEAD_HEIGHT + (height - fan.spokes_height) / 2, hub_top)
    parts += _box(fan.edges[1], hub_top, fan.hub_height, f"rank {fan.hub}", fan.hub_holds)
    return Panel(parts + _hub_cells(fan, hub_top), HEAD_HEIGHT + height + 18)


def _fan(explanation: Explanation, group: GroupExplanation, notified: Sequence[int]) -> Fan:
    """Sort a group's transfers by rank, as many as fit."""
    is_pull = explanation.end == "target"
    groups = (group.source_group, group.target_group)
    mine = [one for one in explanation.transfers if (one.source_group, one.target_group) == groups]
    by_rank: dict[int, list[TransferExplanation]] = {}
    for one in mine:
        by_rank.setdefault(one.source_rank if is_pull else one.target_rank, []).append(one)
    spokes: list[Spoke] = []
    room = MAX_BANDS
    for rank in sorted(by_rank):
        transfers = by_rank[rank][:MAX_BANDS]
        if len(transfers) > room:
            break
        room -= len(transfers)
        spokes.append(Spoke(rank, _bands(explanation, group, transfers)))
    return Fan(
        kind=group.kind,
        hub=explanation.rank,
        hub_is_target=is_pull,
        hub_holds=held_words(group.kind, mine),
        spokes=spokes,
        num_hidden=len(by_rank) - len(spokes),
        notified=notified,
    )


def _bands(
    explanation: Explanation, group: GroupExplanation, transfers: Sequence[TransferExplanation]
) -> list[Band]:
    """Label the transfers of one rank pair, the first one with what the pair moves."""
    details = [pair_words(explanation, transfers[0])] + [""] * (len(transfers) - 1)
    return [
        Band(one, (band_words(group, one), detail))
        for one, detail in zip(transfers, details, strict=True)
    ]


def _row_height(band: Band) -> float:
    return max(band.height + 4, ROW_HEIGHT)


def _column_heads(explanation: Explanation) -> list[str]:
    columns = (
        (svg.PADDING, "start", f"source {explanation.source}"),
        (svg.INNER_WIDTH - svg.PADDING, "end", f"target {explanation.target}"),
    )
    return [
        svg.text(x, 8, words, size=TEXT_SIZE, anchor=anchor, fill=svg.FAINT)
        for x, anchor, words in columns
    ]


def _spokes(fan: Fan, top: float, hub_top: float) -> list[str]:
    """Draw the boxes that face the hub, top to bottom, and what leaves them."""
    parts: list[str] = []
    edge = fan.edges[0]
    hub_place = _first_place(fan, hub_top)
    for spoke in fan.spokes:
        held = held_words(fan.kind, (band.transfer for band in spoke.bands))
        parts += _box(edge, top, spoke.height, f"rank {spoke.rank}", held)
        for band in spoke.bands:
            row_height = _row_height(band)
            parts += _band(fan, spoke.rank, band, top + (row_height - band.height) / 2, hub_place)
            top += row_height
            hub_place += band.height + BAND_GAP
        top += BOX_GAP
    if fan.num_hidden:
        words = f"… {svg.counted(fan.num_hidden, 'more rank')}"
        x = _box_left(edge) + BOX_WIDTH / 2
        parts.append(svg.text(x, top + 12, words, size=TEXT_SIZE, anchor="middle", fill=svg.FAINT))
        top += HIDDEN_HEIGHT + BOX_GAP
    return parts + (_notice(fan, top, hub_top) if fan.notified else [])


def _box_left(edge: float) -> float:
    """Left side of the box that has its bands at an edge."""
    return edge - BOX_WIDTH if edge < svg.INNER_WIDTH / 2 else edge


def _box(
    edge: float, top: float, height: float, name: str, held: str, *, dashed: bool = False
) -> list[str]:
    left, fill = _box_left(edge), svg.PAPER if dashed else svg.PAGE
    middle, width = left + BOX_WIDTH / 2, BOX_WIDTH - 2 * CELL_WIDTH - 8
    y = top + height / 2 + (-3.5 if held else 4.5)
    name, held = svg.fitted(name, width, 13), svg.fitted(held, width, TEXT_SIZE)
    return [
        svg.rect(left, top, BOX_WIDTH, height, radius=6, fill=fill, stroke=BOX_EDGE, dashed=dashed),
        svg.text(middle, y, name, size=13, weight="bold", anchor="middle"),
        svg.text(middle, y + 16, held, size=TEXT_SIZE, anchor="middle", fill=svg.FAINT),
    ]


def _band(fan: Fan, rank: int, band: Band, top: float, hub_top: float) -> list[str]:
    """Draw a band that runs straight along its label, then bends to the hub."""
    begin, height, colour = fan.edges[0], band.height, COLOURS[rank % len(COLOURS)]
    back = _from_hub(fan, hub_top + height, top + height)
    outline = f"M {_to_hub(fan, top, hub_top)} L {back} Z"
    words, detail = band.label
    title = f"{words}: {detail}" if detail else words
    x = begin + fan.step * LABEL_INDENT
    detail = svg.fitted(detail, MAX_LABEL_WIDTH - svg.text_width(words, TEXT_SIZE), TEXT_SIZE)
    label = svg.label(
        x,
        top + height / 2 + 4,
        words,
        detail,
        size=TEXT_SIZE,
        anchor="start" if fan.hub_is_target else "end",
    )
    cells = _cells(begin, -fan.step, top, band, colour)
    return [svg.path(outline, fill=colour, opacity=0.28, title=title), *cells, label]


def _to_hub(fan: Fan, y: float, hub_y: float) -> str:
    """Lead a line from a spoke's box to the hub's."""
    (begin, end), point = fan.edges, svg.point
    bend = begin + fan.step * STRAIGHT_WIDTH
    half = (bend + end) / 2
    curve = f"C {point(half, y)} {point(half, hub_y)} {point(end, hub_y)}"
    return f"{point(begin, y)} L {point(bend, y)} {curve}"


def _from_hub(fan: Fan, hub_y: float, y: float) -> str:
    """Lead the same line the other way."""
    (begin, end), point = fan.edges, svg.point
    bend = begin + fan.step * STRAIGHT_WIDTH
    half = (bend + end) / 2
    curve = f"C {point(half, hub_y)} {point(half, y)} {point(bend, y)}"
    return f"{point(end, hub_y)} {curve} L {point(begin, y)}"


def _first_place(fan: Fan, hub_top: float) -> float:
    """Top of the uppermost band at the hub."""
    return hub_top + (fan.hub_height - fan.bands_height + BAND_GAP) / 2


def _hub_cells(fan: Fan, hub_top: float) -> list[str]:
    parts: list[str] = []
    top = _first_place(fan, hub_top)
    for spoke in fan.spokes:
        for band in spoke.bands:
            colour = COLOURS[spoke.rank % len(COLOURS)]
            parts += _cells(fan.edges[1], fan.step, top, band, colour)
            top += band.height + BAND_GAP
    return parts


def _cells(edge: float, step: int, top: float, band: Band, colour: str) -> list[str]:
    """Draw one cell a unit inside a box's edge, or one for all where they would be a blur."""
    begin, end = band.transfer.units
    count = end - begin if band.height / (end - begin) >= MIN_CELL_HEIGHT else 1
    left, height = edge - (CELL_WIDTH if step < 0 else 0), band.height / count
    return [
        svg.rect(left, top + index * height, CELL_WIDTH, height, fill=colour, stroke=svg.PAPER)
        for index in range(count)
    ]


def _notice(fan: Fan, top: float, hub_top: float) -> list[str]:
    """Draw one dashed box for the ranks that only hear that the request is done."""
    y, edge = top + ROW_HEIGHT / 2, fan.edges[0]
    hub_y = hub_top + (fan.hub_height - 4 if fan.spokes else fan.hub_height / 2)
    line = f"M {_to_hub(fan, y, hub_y)}"
    note, x = "only notified when the request is done", edge + fan.step * LABEL_INDENT
    held = "holds the same" if len(fan.notified) == 1 else "hold the same"
    return [
        *_box(edge, top, ROW_HEIGHT, rank_words(fan.notified), held, dashed=True),
        svg.path(line, fill="none", stroke=BOX_EDGE, dashed=True),
        svg.text(x, y - 6, note, size=TEXT_SIZE, fill=svg.FAINT),
    ]
