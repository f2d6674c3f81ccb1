"""Pictures of plans: who reads which heads from whom, and how the blocks of both sides meet."""

from __future__ import annotations

import textwrap

import msgspec

from kvferry.picture import ranks, ruler, svg
from kvferry.picture.svg import Panel
from kvferry.plan import Explanation, GroupExplanation

__all__ = ["to_svg"]

# Longer engine ids would push the numbers out of sight; the description has them in full.
MAX_ID_CHARS = 24
TITLE_LINE_CHARS = 92
# A model may give each layer a group; a page has an end.
MAX_GROUPS = 8


def to_svg(explanation: Explanation) -> str:
    """Draw a plan as a standalone SVG document.

    Parameters
    ----------
    explanation
        Made by `Plan.explain`.

    Returns
    -------
    str
        The same text for the same explanation. It names no font and loads nothing.

    Examples
    --------
    >>> from kvferry import AttentionGroup, EngineSpec, ModelSpec, Route
    >>> model = ModelSpec(groups=(AttentionGroup((0, 1), num_kv_heads=8, head_dim=64),))
    >>> wide = EngineSpec("wide", model, tokens_per_block=24, layout="KBHND", tp_size=4)
    >>> narrow = EngineSpec("narrow", model, tokens_per_block=16, layout="KBNHD", tp_size=2)
    >>> plan = Route(wide, narrow).plan(0, [[7, 3]], [[5, 2, 8]], tokens=(0, 40))
    >>> to_svg(plan.explain()).startswith("<svg xmlns=")
    True
    """
    shown = _with_short_ids(explanation)
    panels = [_header(shown)]
    drawn = shown.groups[:MAX_GROUPS]
    panels += [_section(shown, index, group) for index, group in enumerate(drawn)]
    if hidden := len(shown.groups) - len(drawn):
        words = f"… {svg.counted(hidden, 'more pair')} of groups"
        panels.append(Panel([svg.text(svg.MARGIN, 12, words, size=13, fill=svg.FAINT)], 16))
    top, parts = svg.MARGIN, []
    for panel in panels:
        parts.append(svg.moved(panel.parts, y=top))
        top += panel.height + svg.MARGIN / 2
    title = str(explanation).splitlines()[0]
    return svg.document(parts, height=top + svg.MARGIN / 2, title=title, text=str(explanation))


def _with_short_ids(explanation: Explanation) -> Explanation:
    short = {
        name: svg.clipped(getattr(explanation, name), MAX_ID_CHARS) for name in ("source", "target")
    }
    return msgspec.structs.replace(explanation, **short)


def _header(explanation: Explanation) -> Panel:
    """Say who reads how much, and how well it moves."""
    lines = textwrap.wrap(str(explanation).splitlines()[0], TITLE_LINE_CHARS)
    parts = [
        svg.text(svg.MARGIN, 18 + 24 * index, line, size=17, weight="bold")
        for index, line in enumerate(lines)
    ]
    bottom = 18 + 24 * len(lines)
    parts.append(svg.text(svg.MARGIN, bottom, _verdict(explanation), size=13, fill=svg.FAINT))
    return Panel(parts, bottom + 8)


def _verdict(explanation: Explanation) -> str:
    if not explanation.pairs:
        return "Nothing is due: the plan is empty, and it completes."
    pairs, staged = len(explanation.pairs), sum(pair.staging_pays for pair in explanation.pairs)
    mean = svg.size(explanation.num_bytes / max(explanation.num_fragments, 1))
    verdict = f"{svg.counted(pairs, 'rank pair')}, {mean} a fragment on average; staging "
    if staged in (0, pairs):
        return verdict + ("pays on a wire" if staged else "does not pay")
    return verdict + f"pays on a wire for {staged} of them"


def _section(explanation: Explanation, index: int, group: GroupExplanation) -> Panel:
    """Draw one pair of groups: ranks above, blocks below, in a frame."""
    heading, facts = _heading(group)
    parts = [
        svg.text(svg.PADDING, 30, heading, size=14, weight="bold"),
        svg.text(svg.INNER_WIDTH - svg.PADDING, 30, facts, size=12, anchor="end", fill=svg.FAINT),
    ]
    bottom = 52.0
    notified = explanation.notify_only if index == 0 else ()
    for panel in (ranks.draw(explanation, group, notified), ruler.draw(group)):
        parts.append(svg.moved(panel.parts, y=bottom))
        bottom += panel.height
    height = bottom + 4
    frame = svg.rect(0, 0, svg.INNER_WIDTH, height, radius=10, fill=svg.PAPER, stroke=svg.EDGE)
    return Panel([svg.moved([frame, *parts], x=svg.MARGIN)], height)


def _heading(group: GroupExplanation) -> tuple[str, str]:
    heading = f"{group.kind} group {group.source_group} → {group.target_group}"
    layers = svg.counted(group.num_layers, "layer")
    if group.kind == "state":
        return heading, f"{layers}, " + ("one state" if group.num_tokens else "no state is due")
    if not group.num_tokens:
        return heading, f"{layers}, no tokens are due"
    due = f"{svg.counted(group.num_tokens, 'token')} due"
    stretches = svg.counted(group.num_stretches, "stretch", "stretches")
    return heading, f"{layers}, {due} in {stretches} of blocks"
