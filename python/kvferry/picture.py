"""Pictures of plans."""

from __future__ import annotations

from kvferry.plan import Explanation

__all__ = ["to_svg"]


def to_svg(explanation: Explanation) -> str:
    """Draw a plan; see `Plan.to_svg`."""
    raise NotImplementedError
