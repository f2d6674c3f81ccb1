"""The record of a wrong byte, and how a byte's place is turned back into an element's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .addresses import DTYPE_BITS, axes_of, head_range, row_bytes, slots
from .memory import Region

__all__ = ["Mismatch", "dim_at", "locate"]

SHOWN_BYTES = 16


@dataclass(frozen=True)
class Mismatch:
    """The first place at which a target's bytes are not what the contract says.

    `head` counts the model's heads and `dim` the elements of that head's row. A byte of padding has
    no layer, plane, block, head and dim; `token` is `None` wherever nothing was due. `expected`
    and `found` are the row's bytes from `offset_bytes` (counted from the tensor's first byte) on.
    """

    slot: int
    group: int
    layer: int | None
    plane: str | None
    block: int | None
    token: int | None
    head: int | None
    dim: int | None
    offset_bytes: int
    expected: bytes
    found: bytes

    def __str__(self) -> str:
        """Say where, why it matters, and what is there instead of what."""
        place = "padding"
        if self.layer is not None:
            place = f"layer {self.layer}, plane {self.plane}, block {self.block}, head {self.head}"
            place += f", dim {self.dim}"
        what = "not due, yet changed" if self.token is None else f"token {self.token} is due"
        return (
            f"tensor {self.slot} of group {self.group}, byte {self.offset_bytes}, {place}, {what}: "
            f"expected {self.expected[:SHOWN_BYTES].hex(' ')}, "
            f"found {self.found[:SHOWN_BYTES].hex(' ')}"
        )


def dim_at(group: Any, byte: int) -> int:
    """Return the element of a row to which its byte `byte` belongs."""
    return byte * 8 // DTYPE_BITS[group.dtype]


def locate(
    engine: Any,
    rank: int,
    region: Region,
    tensors: Sequence[np.ndarray],
    offset: int,
    expected: np.ndarray,
    found: np.ndarray,
) -> Mismatch:
    """Name the element of one of the region's `uint8` tensors that has the byte at `offset`.

    `expected` and `found` begin with that byte.
    """
    padding = None
    for i, first in zip(region.members, region.offsets, strict=True):
        slot = slots(engine, rank)[i]
        group = engine.model.groups[slot.group]
        byte = offset - first
        index = _index_at(axes_of(engine, slot.group), tensors[i], byte)
        if index is None:
            padding = Mismatch(
                i, slot.group, None, None, None, None, None, None, byte,
                expected[:1].tobytes(), found[:1].tobytes(),
            )  # fmt: skip
            continue
        plane, inner = slot.planes[index.get("K", 0)], index.get("D", index.get("C", 0))
        if "C" in index and inner >= row_bytes(group, "K"):
            plane, inner = "V", inner - row_bytes(group, "K")
        left = row_bytes(group, plane) - inner
        return Mismatch(
            slot=i,
            group=slot.group,
            layer=slot.layers[index.get("L", 0)],
            plane=plane,
            block=index["B"],
            token=None,
            head=head_range(engine, slot.group, rank)[index["H"]],
            dim=dim_at(group, inner),
            offset_bytes=byte,
            expected=expected[:left].tobytes(),
            found=found[:left].tobytes(),
        )
    assert padding is not None, "a region has members"
    return padding


def _index_at(axes: str, tensor: np.ndarray, byte: int) -> dict[str, int] | None:
    """Return the index of the element that has a byte; `None` where it is padding."""
    if byte < 0:
        return None
    index = {}
    for letter, size, stride in zip(axes, tensor.shape, tensor.strides, strict=True):
        index[letter] = 0 if size == 1 else min(byte // stride, size - 1)
        byte -= index[letter] * stride
    return None if byte else index
