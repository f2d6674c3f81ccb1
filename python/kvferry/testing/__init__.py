"""A slow, obvious reference of what plans and copies must do, to test connectors against.

It reads specs by attribute name and works on numpy arrays. It imports nothing of kvferry's
planner, so that the two can only agree by both being right. Random models, engines and requests to
try it on are in `kvferry.testing.strategies`, which needs hypothesis.

>>> import numpy as np
>>> from kvferry.testing import poison, snapshot
>>> tensor = np.zeros((4, 8), np.uint16)
>>> poison([tensor])
>>> bool((snapshot([tensor])[0] == tensor.view(np.uint8)).all())
True
"""

from .addresses import holders, planes_of
from .buffers import allocate, axes_handed_over
from .descriptors import apply_descriptors, apply_staged_descriptors
from .memory import snapshot
from .mismatch import Mismatch
from .moves import coalesce, expand_loops, expected_moves, greedy_count
from .pattern import poison
from .reference import check_reference, fill_reference
from .routing import (
    chosen_source,
    due_tokens,
    expected_bytes,
    expected_error,
    expected_pairs,
    expected_push_bytes,
    readers,
)
from .scenario import Scenario, Side
from .tensors import Slot, axes_of, slots, tensor_shape

__all__ = [
    "Mismatch",
    "Scenario",
    "Side",
    "Slot",
    "allocate",
    "apply_descriptors",
    "apply_staged_descriptors",
    "axes_handed_over",
    "axes_of",
    "check_reference",
    "chosen_source",
    "coalesce",
    "due_tokens",
    "expand_loops",
    "expected_bytes",
    "expected_error",
    "expected_moves",
    "expected_pairs",
    "expected_push_bytes",
    "fill_reference",
    "greedy_count",
    "holders",
    "planes_of",
    "poison",
    "readers",
    "slots",
    "snapshot",
    "tensor_shape",
]
