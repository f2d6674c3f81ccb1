"""The lower half of a group's picture: the blocks of both sides along the request's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvferry.picture import svg
from kvferry.picture.svg import Panel
from kvferry.plan import GroupExplanation, StretchExplanation

__all__ = ["draw"]

MAX_STRETCHES = 48
# Names of the rows stand left of the ruler.
GUTTER = 118.0
LEFT = svg.PADDING + GUTTER
WIDTH = svg.INNER_WIDTH - svg.PADDING - LEFT
# Of the smaller block: wide enough for its id, narrow enough for several in a row.
MIN_BLOCK_WIDTH, MAX_ID_WIDTH, MAX_BLOCK_WIDTH = 22.0, 48.0, 170.0
ROW_HEIGHT, ROW_GAP = 26.0, 12.0
TICK_SIZE, ID_SIZE = 10.0, 11.0
COLOURS = ("#f0a742", "#5fb3a1", "#d9728a", "#7c9fd6", "#a8b545", "#b48ad0")


class Block(NamedTuple):
    """One block of one side, by the tokens that it covers."""

    id: int
    begin: int
    end: int


class Line(NamedTuple):
    """A piece of the token axis that is drawn in one row."""

    begin: int
    end: int
    scale: float

    def x(self, token: int) -> float:
        """Place of a token boundary."""
        return LEFT + (token - self.begin) * self.scale

    def clip(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return what of a token range lies here."""
        begin, end = max(begin, self.begin), min(end, self.end)
        return (begin, end) if begin < end else None


def draw(group: GroupExplanation) -> Panel:
    """Draw source blocks above target blocks, due tokens coloured by stretch."""
    stretches = group.stretches[:MAX_STRETCHES]
    if not stretches:
        return Panel([], 0)
    source = _blocks(stretches, group.source_tokens_per_block, of_source=True)
    target = _blocks(stretches, group.target_tokens_per_block, of_source=False)
    parts, top = _headline(group), 36.0
    for line in _lines(group, stretches, [*source, *target]):
        panel = _line(group, line, stretches, source, target)
        parts.append(svg.moved(panel.parts, y=top))
        top += panel.height
    hidden = group.num_stretches - len(stretches)
    if hidden > 0:
        words = f"… {hidden:,} more"
        parts.append(svg.text(LEFT, top + 10, words, size=12, fill=svg.FAINT))
        top += 20
    return Panel(parts, top)


def _blocks(
    stretches: Sequence[StretchExplanation], tokens_per_block: int, *, of_source: bool
) -> list[Block]:
    """Blocks in which the stretches lie, each once."""
    blocks: list[Block] = []
    for one in stretches:
        offset = one.source_offset if of_source else one.target_offset
        begin = one.tokens[0] - offset
        id_ = one.source_block if of_source else one.target_block
        block = Block(id_, begin, begin + tokens_per_block)
        if block not in blocks[-1:]:
            blocks.append(block)
    return blocks


def _lines(
    group: GroupExplanation, stretches: Sequence[StretchExplanation], blocks: Sequence[Block]
) -> list[Line]:
    """Cut the token axis into rows of one scale; what is far from due tokens is left out."""
    small = min(group.source_tokens_per_block, group.target_tokens_per_block)
    runs = [_with_rims(run, small, blocks) for run in _runs(stretches, small)]
    longest = max(end - begin for begin, end in runs)
    ids = max(svg.text_width(str(block.id), ID_SIZE, mono=True) for block in blocks)
    least = max(MIN_BLOCK_WIDTH, min(ids + 6, MAX_ID_WIDTH)) / small
    most = MAX_BLOCK_WIDTH / min(small, longest)
    scale = min(max(WIDTH / longest, least), most)
    per_line = max(int(WIDTH / scale + 1e-9), 1)
    if longest > per_line > small:
        per_line -= per_line % small
    due_end = stretches[-1].tokens[1]
    return [
        Line(line, min(line + per_line, end), scale)
        for begin, end in runs
        for line in range(begin, end, per_line)
        if line < due_end
    ]


def _runs(stretches: Sequence[StretchExplanation], small: int) -> list[tuple[int, int]]:
    """Token ranges of stretches without a wide hole between them."""
    runs: list[tuple[int, int]] = []
    for begin, end in (one.tokens for one in stretches):
        if runs and begin - runs[-1][1] <= 2 * small:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _with_rims(run: tuple[int, int], small: int, blocks: Sequence[Block]) -> tuple[int, int]:
    """Show a little of the outer blocks' tokens that are not due."""
    begin, end = run
    rim = min(small, max((end - begin) // 2, 1))
    first = min(block.begin for block in blocks if block.begin <= begin < block.end)
    last = max(block.end for block in blocks if block.begin < end <= block.end)
    return max(begin - rim, first), min(end + rim, last)


def _line(
    group: GroupExplanation,
    line: Line,
    stretches: Sequence[StretchExplanation],
    source: Sequence[Block],
    target: Sequence[Block],
) -> Panel:
    source_top = 8.0
    target_top = source_top + ROW_HEIGHT + ROW_GAP
    word = "slot" if group.kind == "state" else "block"
    parts = _row_names(group, (source_top, target_top)) + _holes(line, stretches, target_top - 2)
    parts += _beds(line, source, source_top) + _beds(line, target, target_top)
    parts += _fills(line, stretches, source_top, target_top)
    for blocks, top in ((source, source_top), (target, target_top)):
        parts += _outlines(line, blocks, top, word)
    if group.kind != "state":
        ends = [end for one in (stretches[0], stretches[-1]) for end in one.tokens]
        due = {ends[0], ends[-1]}
        parts += _ticks(line, source, due, source_top - 4)
        parts += _ticks(line, target, due, target_top + ROW_HEIGHT + 12)
    return Panel(parts, target_top + ROW_HEIGHT + 28)


def _headline(group: GroupExplanation) -> list[str]:
    words = "slots" if group.kind == "state" else "blocks by token position, one colour a stretch"
    edge = f"M {svg.point(svg.PADDING, 0)} H {svg.INNER_WIDTH - svg.PADDING}"
    return [
        svg.path(edge, fill="none", stroke=svg.EDGE),
        svg.text(svg.PADDING, 20, words, size=12, fill=svg.FAINT),
    ]


def _row_names(group: GroupExplanation, tops: tuple[float, float]) -> list[str]:
    sizes = (group.source_tokens_per_block, group.target_tokens_per_block)
    parts = []
    for name, tokens_per_block, top in zip(("source", "target"), sizes, tops, strict=True):
        parts.append(svg.text(svg.PADDING, top + 12, name, size=12, weight="bold"))
        words = f"{svg.counted(tokens_per_block, 'token')} a block"
        if group.kind == "state":
            words = "one slot a state"
        parts.append(svg.text(svg.PADDING, top + 25, words, size=10, fill=svg.FAINT))
    return parts


def _visible(line: Line, blocks: Iterable[Block]) -> list[tuple[Block, int, int]]:
    """Blocks that a row shows, with the tokens of theirs that it shows."""
    clipped = ((block, line.clip(block.begin, block.end)) for block in blocks)
    return [(block, *tokens) for block, tokens in clipped if tokens]


def _beds(line: Line, blocks: Sequence[Block], top: float) -> list[str]:
    """Draw whole blocks in grey, on which due tokens are coloured."""
    return [
        svg.rect(line.x(begin), top, (end - begin) * line.scale, ROW_HEIGHT, fill=svg.HOLLOW)
        for _, begin, end in _visible(line, blocks)
    ]


def _fills(
    line: Line, stretches: Sequence[StretchExplanation], source_top: float, target_top: float
) -> list[str]:
    """Colour each stretch in both rows, and faintly between them."""
    parts = []
    for index, one in enumerate(stretches):
        tokens = line.clip(*one.tokens)
        if tokens is None:
            continue
        left, width = line.x(tokens[0]), (tokens[1] - tokens[0]) * line.scale
        colour, title = COLOURS[index % len(COLOURS)], _stretch_words(one)
        rows = ((source_top, ROW_HEIGHT, 0.75), (target_top, ROW_HEIGHT, 0.75))
        for top, height, opacity in (*rows, (source_top + ROW_HEIGHT, ROW_GAP, 0.25)):
            parts.append(
                svg.rect(left, top, width, height, fill=colour, opacity=opacity, title=title)
            )
    return parts


def _holes(line: Line, stretches: Sequence[StretchExplanation], baseline: float) -> list[str]:
    """Say that tokens between stretches are not due."""
    parts = []
    for before, after in pairwise(stretches):
        tokens = line.clip(before.tokens[1], after.tokens[0])
        if tokens and (tokens[1] - tokens[0]) * line.scale > 60:
            x = (line.x(tokens[0]) + line.x(tokens[1])) / 2
            parts.append(svg.text(x, baseline, "not due", size=11, anchor="middle", fill=svg.FAINT))
    return parts


def _stretch_words(one: StretchExplanation) -> str:
    return (
        f"tokens [{one.tokens[0]}, {one.tokens[1]}): "
        f"block {one.source_block} from {one.source_offset} → "
        f"block {one.target_block} from {one.target_offset}"
    )


def _outlines(line: Line, blocks: Sequence[Block], top: float, word: str) -> list[str]:
    """Draw block boundaries, open where a row cuts a block, and ids."""
    parts = []
    for block, begin, end in _visible(line, blocks):
        left, right, bottom = line.x(begin), line.x(end), top + ROW_HEIGHT
        outline = (
            f"M {svg.point(left, top)} H {right:.2f} M {svg.point(left, bottom)} H {right:.2f}"
        )
        for is_whole, x in ((begin == block.begin, left), (end == block.end, right)):
            outline += f" M {svg.point(x, top)} V {bottom}" if is_whole else ""
        parts.append(svg.path(outline, fill="none", stroke=svg.INK))
        words = _id_words(block.id, word, right - left - 4)
        middle, baseline = (left + right) / 2, top + ROW_HEIGHT / 2 + 4
        if words:
            parts.append(
                svg.text(middle, baseline, words, size=ID_SIZE, mono=True, anchor="middle")
            )
    return parts


def _id_words(id_: int, word: str, width: float) -> str:
    """As much of a block's name as fits; of a long id its end."""
    for words in (f"{word} {id_}", str(id_), f"…{id_ % 1000:03}"):
        if svg.text_width(words, ID_SIZE, mono=True) <= width:
            return words
    return ""


def _ticks(line: Line, blocks: Sequence[Block], due: set[int], baseline: float) -> list[str]:
    """Write token positions at block boundaries and at the ends of what is due, where they fit."""
    edges = {edge for block in blocks for edge in (block.begin, block.end)}
    taken: list[tuple[float, float]] = []
    parts = []
    for token in [*sorted(due), *sorted(edges - due)]:
        if not line.begin <= token <= line.end:
            continue
        x, half = line.x(token), svg.text_width(f"{token}", TICK_SIZE, mono=True) / 2 + 2
        if any(x - half < right and left < x + half for left, right in taken):
            continue
        taken.append((x - half, x + half))
        fill, weight = (svg.INK, "bold") if token in due else (svg.FAINT, None)
        parts.append(
            svg.text(
                x,
                baseline,
                f"{token}",
                size=TICK_SIZE,
                mono=True,
                anchor="middle",
                fill=fill,
                weight=weight,
            )
        )
    return parts
