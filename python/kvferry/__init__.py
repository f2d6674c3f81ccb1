"""kvferry moves KV caches between serving engines that agree on nothing.

Describe both engines (`EngineSpec`), pair them (`Route`), register tensors (`KVCache`), plan one
request (`Route.plan`), and copy it or hand its descriptors to a transport (`Plan`).
"""

from kvferry import errors
from kvferry._core import __version__
from kvferry.cache import KVCache, RankDescription, SlotDescription
from kvferry.layout import Layout
from kvferry.plan import Descriptors, Explanation, Loops, Plan, Route
from kvferry.specs import (
    AttentionGroup,
    EngineSpec,
    LatentGroup,
    ModelSpec,
    StateGroup,
    StatePart,
)

__all__ = [
    "AttentionGroup",
    "Descriptors",
    "EngineSpec",
    "Explanation",
    "KVCache",
    "LatentGroup",
    "Layout",
    "Loops",
    "ModelSpec",
    "Plan",
    "RankDescription",
    "Route",
    "SlotDescription",
    "StateGroup",
    "StatePart",
    "__version__",
    "errors",
]
