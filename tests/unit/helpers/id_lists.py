"""Block ids in every container that they may come in, and in none that they may."""

from __future__ import annotations

import array
from collections import UserList, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class PlainSequence(Sequence):
    """A sequence that knows no slices."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            raise TypeError("no slices")
        return self.items[index]


class DLPackOnly:
    """A tensor that speaks DLPack and nothing else: numpy's, its other names hidden."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


COPIED = {
    "list": list,
    "tuple": tuple,
    "range": lambda ids: range(ids[0], ids[-1] + 1),
    "user list": UserList,
    "deque": deque,
    "no slices": PlainSequence,
    "list of numpy": lambda ids: [np.int32(i) for i in ids],
    "list of torch": lambda ids: list(torch.tensor(ids)),
    "subclass": type("Ids", (list,), {}),
}
VIEWED = {
    "int16": lambda ids: np.array(ids, np.int16),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big endian": lambda ids: np.array(ids, ">i4"),
    "backwards": lambda ids: np.array(ids[::-1])[::-1],
    "every other": lambda ids: np.array([[i, 99] for i in ids])[:, 0],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), np.int64),
    "subclass": lambda ids: np.array(ids).view(np.recarray),
    "torch": torch.tensor,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch uint8": lambda ids: torch.tensor(ids, dtype=torch.uint8),
    "array": lambda ids: array.array("l", ids),
    "bytearray": bytearray,
    "memoryview": lambda ids: memoryview(array.array("i", ids)),
    "dlpack only": lambda ids: DLPackOnly(np.array(ids)),
    "memoryview of numpy": lambda ids: memoryview(np.array(ids, ">i4")),
}
NO_LISTS = [None, 5, {5}, {0: 1}, "56", b"56", 1.0, np.array(5), iter([5]), object(), np.int64(5)]
NO_IDS = [
    np.array([0.5]),
    np.array([True]),
    np.array(["0"]),
    np.array([0], object),
    np.array([0], "M8[s]"),
    np.array([[0]]),
    np.zeros((1, 1, 1), int),
    torch.tensor([0.5]),
    torch.tensor([True]),
    torch.tensor([[0]]),
    torch.tensor(0),
    array.array("d", [0.0]),
    memoryview(np.array([True])),
    DLPackOnly(np.array([0.5])),
    DLPackOnly(np.array([[0]])),
    memoryview(np.zeros((1, 1), int)),
]


def numbers(ids: Any) -> list[int]:
    """Read ids as plain numbers; a memory view of foreign byte order cannot read itself."""
    return np.asarray(ids).tolist()


def shares_memory(view: Any, ids: Any) -> bool:
    # Numpy copies an `array.array`, unless a memory view stands between.
    if isinstance(ids, array.array):
        ids = memoryview(ids)
    owner = np.from_dlpack(ids) if isinstance(ids, DLPackOnly) else np.asarray(ids)
    return np.shares_memory(np.asarray(view), owner)
