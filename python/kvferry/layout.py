"""Layouts: the axes of a cache tensor as a string of letters, in memory order."""

from __future__ import annotations

from kvferry import _core

__all__ = ["Layout"]


class Layout(str):
    """Axis letters of a tensor, outermost first; compares and hashes equal to its string.

    ====== ==========================================================
    letter axis
    ====== ==========================================================
    ``L``  layers that one tensor spans
    ``B``  blocks
    ``K``  the key plane and the value plane, size 2
    ``N``  token slots inside a block
    ``H``  KV heads that the rank holds
    ``D``  elements of one head, innermost
    ``C``  one head's key then value elements, in place of K and D
    ====== ==========================================================

    With neither ``K`` nor ``C`` each layer registers two tensors, key then value. ``"NHD"`` and
    ``"HND"`` are shorthands for ``"KBNHD"`` and ``"KBHND"``.

    Raises
    ------
    LayoutError
        An unknown or repeated letter, no ``B`` or ``N``, neither or both of ``D`` and ``C``, both
        ``K`` and ``C``, or ``D`` or ``C`` not last.

    Examples
    --------
    >>> Layout("HND") == "KBHND"
    True
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Layout:
        """Parse `text`; a shorthand becomes what it stands for."""
        return super().__new__(cls, _core.canonical_layout(text))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"
