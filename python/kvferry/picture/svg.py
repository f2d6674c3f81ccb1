"""Strings of SVG: shapes, text that fits, colours and the page's measures. Lengths are pixels."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvferry._words import counted, size

__all__ = [
    "Panel",
    "clipped",
    "counted",
    "document",
    "fitted",
    "label",
    "moved",
    "path",
    "point",
    "rect",
    "size",
    "text",
    "text_width",
]

WIDTH = 960.0
MARGIN = 28.0
PADDING = 20.0
INNER_WIDTH = WIDTH - 2 * MARGIN

# Ink and paper of a card that reads the same on light and dark pages.
INK, FAINT = "#1f2328", "#59636e"
PAGE, PAPER, EDGE, HOLLOW = "#f6f8fa", "#ffffff", "#d1d9e0", "#eef1f4"

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
# Wider than the average of the fonts above, so that text never outgrows what is kept for it.
SANS_EM, MONO_EM = 0.57, 0.61

# XML 1.0 has no place for other characters, not even escaped.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Panel(NamedTuple):
    """Elements drawn from y = 0 downwards, and how far they reach."""

    parts: list[str]
    height: float


def document(parts: Iterable[str], *, height: float, title: str, text: str) -> str:
    """Close a page: its size, its background, and what a screen reader says."""
    root = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {_number(WIDTH)} {_number(height)}",
        "width": WIDTH,
        "height": height,
        "role": "img",
        "font-family": SANS,
    }
    page = rect(0.5, 0.5, WIDTH - 1, height - 1, radius=12, fill=PAGE, stroke=EDGE)
    words = [_element("title", {}, escaped(title)), _element("desc", {}, escaped(text))]
    return _element("svg", root, "\n".join(["", *words, page, *parts, ""])) + "\n"


def moved(parts: Iterable[str], *, x: float = 0, y: float = 0) -> str:
    """Group elements and move them."""
    place = {"transform": f"translate({_number(x)} {_number(y)})"}
    return _element("g", place, "\n".join(["", *parts, ""]))


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    stroke: str | None = None,
    radius: float = 0,
    dashed: bool = False,
    opacity: float = 1,
    title: str = "",
) -> str:
    """Draw a rectangle; `title` shows where a pointer rests on it."""
    place: dict[str, object] = {"x": x, "y": y, "width": width, "height": height}
    look = _look(fill=fill, stroke=stroke, dashed=dashed, opacity=opacity)
    corner = {"rx": radius} if radius else {}
    content = _element("title", {}, escaped(title)) if title else ""
    return _element("rect", place | corner | look, content)


def path(
    steps: str,
    *,
    fill: str,
    stroke: str | None = None,
    dashed: bool = False,
    opacity: float = 1,
    title: str = "",
) -> str:
    """Draw a path of commands and points."""
    look = _look(fill=fill, stroke=stroke, dashed=dashed, opacity=opacity)
    content = _element("title", {}, escaped(title)) if title else ""
    return _element("path", {"d": steps} | look, content)


def point(x: float, y: float) -> str:
    """Write a point of a path."""
    return f"{_number(x)} {_number(y)}"


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float,
    anchor: str = "start",
    fill: str = INK,
    weight: str | None = None,
    mono: bool = False,
) -> str:
    """Write one line whose baseline is `y`."""
    look: dict[str, object] = {"x": x, "y": y, "font-size": size, "fill": fill}
    if anchor != "start":
        look["text-anchor"] = anchor
    if weight:
        look["font-weight"] = weight
    if mono:
        look["font-family"] = MONO
    return _element("text", look, escaped(content))


def label(x: float, y: float, bold: str, plain: str, *, size: float, anchor: str) -> str:
    """Write one line that begins in bold."""
    words = [_element("tspan", {"font-weight": "bold"}, escaped(bold))]
    words += [escaped(f" · {plain}")] if plain else []
    look = {"x": x, "y": y, "font-size": size, "fill": INK, "text-anchor": anchor}
    return _element("text", look, "".join(words))


def text_width(content: str, size: float, *, mono: bool = False) -> float:
    """Return about how wide a line is; fonts differ, so this is on the safe side."""
    return len(content) * size * (MONO_EM if mono else SANS_EM)


def fitted(content: str, width: float, size: float) -> str:
    """Shorten a line to a width."""
    return clipped(content, max(int(width / (size * SANS_EM)), 1))


def clipped(content: str, max_chars: int) -> str:
    """Shorten text to a number of characters, the last an ellipsis."""
    return content if len(content) <= max_chars else content[: max_chars - 1] + "…"


def escaped(content: str) -> str:
    """Make text safe between tags and in attributes."""
    return html.escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", content))


def _look(*, fill: str, stroke: str | None, dashed: bool, opacity: float) -> dict[str, object]:
    """Attributes of a shape's look; what has its default is left out."""
    look: dict[str, object] = {"fill": fill}
    if stroke:
        look["stroke"] = stroke
    if dashed:
        look["stroke-dasharray"] = "4 4"
    if opacity != 1:
        look["fill-opacity"] = opacity
    return look


def _element(name: str, attributes: Mapping[str, object], content: str = "") -> str:
    """Write one element; numbers are rounded to a tenth."""
    words = [name]
    for key, value in attributes.items():
        shown = _number(value) if isinstance(value, int | float) else escaped(str(value))
        words.append(f'{key}="{shown}"')
    opening = " ".join(words)
    return f"<{opening}>{content}</{name}>" if content else f"<{opening}/>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
