"""A slow, obvious reference of what plans and copies must do, to test connectors against.

It reads specs by attribute name and works on numpy arrays. It imports nothing of kvferry's
planner, so that the two can only agree by both being right.

>>> import numpy as np
>>> from kvferry.testing import poison, snapshot
>>> tensor = np.zeros((4, 8), np.uint16)
>>> poison([tensor])
>>> bool((snapshot([tensor])[0] == tensor.view(np.uint8)).all())
True
"""

from .addresses import Slot, axes_of, holders, slots, tensor_shape
from .descriptors import apply_descriptors
from .memory import snapshot
from .mismatch import Mismatch
from .pattern import poison
from .reference import check_reference, fill_reference
from .routing import (
    chosen_source,
    due_tokens,
    expected_bytes,
    expected_error,
    expected_pairs,
    readers,
)

__all__ = [
    "Mismatch",
    "Slot",
    "apply_descriptors",
    "axes_of",
    "check_reference",
    "chosen_source",
    "due_tokens",
    "expected_bytes",
    "expected_error",
    "expected_pairs",
    "fill_reference",
    "holders",
    "poison",
    "readers",
    "slots",
    "snapshot",
    "tensor_shape",
]
