"""The record of a wrong byte, and how a byte's place is turned back into an element's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .addresses import (
    DTYPE_BITS,
    has_heads,
    has_tokens,
    part_of,
    physical_blocks,
    row_bytes,
    sharded_axis,
    units_of_rank,
)
from .memory import Region
from .tensors import Slot, axis_names, slots

__all__ = ["Mismatch", "dim_at", "locate", "shown_unit"]

SHOWN_BYTES = 16


@dataclass(frozen=True)
class Mismatch:
    """The first place at which a target's bytes are not what the contract says.

    `plane` is `"K"`, `"V"`, `"latent"` or a state part's name; `head` counts the model's heads, or
    the part's units, and is `None` where nothing is sharded; `dim` is the element of that head's
    row. `block` is the engine's block id or state slot. A byte of padding has none of these.
    `token` is `None` wherever nothing was due, and for states. `expected` and `found` are the row's
    bytes from `offset_bytes` (counted from the tensor's first byte) on.
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
    due: bool = False

    def __str__(self) -> str:
        """Say where, why it matters, and what is there instead of what."""
        place = "padding"
        if self.layer is not None:
            place = f"layer {self.layer}, plane {self.plane}, block {self.block}"
            place += "" if self.head is None else f", head {self.head}"
            place += f", dim {self.dim}"
        what = "not due, yet changed"
        if self.due:
            what = "the state is due" if self.token is None else f"token {self.token} is due"
        return (
            f"tensor {self.slot} of group {self.group}, byte {self.offset_bytes}, {place}, {what}: "
            f"expected {self.expected[:SHOWN_BYTES].hex(' ')}, "
            f"found {self.found[:SHOWN_BYTES].hex(' ')}"
        )


def dim_at(group: Any, plane: str, byte: int) -> int:
    """Return the element of a plane's row to which its byte `byte` belongs."""
    dtype = group.dtype if has_tokens(group) else part_of(group, plane).dtype
    return byte * 8 // DTYPE_BITS[dtype]


def shown_unit(group: Any, plane: str, unit: int) -> int | None:
    """Return what `Mismatch.head` says of a unit."""
    is_sharded = has_heads(group) if has_tokens(group) else sharded_axis(group, plane) is not None
    return unit if is_sharded else None


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
        names = axis_names(engine, slot)
        index = _index_at(names, tensors[i], byte)
        if index is None:
            padding = Mismatch(
                i, slot.group, None, None, None, None, None, None, byte,
                expected[:1].tobytes(), found[:1].tobytes(),
            )  # fmt: skip
            continue
        if has_tokens(group):
            plane, unit, inner, left = _in_token_row(group, slot, index)
        else:
            plane = slot.planes[0]
            unit, inner, left = _in_state_row(group, plane, index, tensors[i].shape)
        return Mismatch(
            slot=i,
            group=slot.group,
            layer=slot.layers[index.get("L", 0)],
            plane=plane,
            block=index["B"] // physical_blocks(engine, slot.group),
            token=None,
            head=shown_unit(group, plane, units_of_rank(engine, slot.group, plane, rank)[unit]),
            dim=dim_at(group, plane, inner),
            offset_bytes=byte,
            expected=expected[:left].tobytes(),
            found=found[:left].tobytes(),
        )
    assert padding is not None, "a region has members"
    return padding


def _in_token_row(group: Any, slot: Slot, index: dict[str, int]) -> tuple[str, int, int, int]:
    """Return plane, local unit, byte of the row, and bytes that are left of the row."""
    plane, inner = slot.planes[index.get("K", 0)], index.get("D", index.get("C", 0))
    if "C" in index and inner >= row_bytes(group, "K"):
        plane, inner = "V", inner - row_bytes(group, "K")
    return plane, index.get("H", 0), inner, row_bytes(group, plane) - inner


def _in_state_row(
    group: Any, plane: str, index: dict[str, int], shape: tuple[int, ...]
) -> tuple[int, int, int]:
    """Return local unit, byte of the row, and bytes that are left of the innermost axis."""
    sizes = list(shape[1:])
    place = [index[str(axis)] for axis in range(len(sizes))]
    unit, sharded = 0, sharded_axis(group, plane)
    if sharded is not None:
        axis, per_unit = sharded
        if axis == len(sizes) - 1:
            per_unit = per_unit * DTYPE_BITS[part_of(group, plane).dtype] // 8
        unit, place[axis] = divmod(place[axis], per_unit)
        sizes[axis] = per_unit
    return unit, int(np.ravel_multi_index(place, sizes)), sizes[-1] - place[-1]


def _index_at(names: Sequence[str], tensor: np.ndarray, byte: int) -> dict[str, int] | None:
    """Return the index of the element that has a byte; `None` where it is padding."""
    if byte < 0:
        return None
    index = {}
    for name, size, stride in zip(names, tensor.shape, tensor.strides, strict=True):
        index[name] = 0 if size == 1 else min(byte // stride, size - 1)
        byte -= index[name] * stride
    return None if byte else index
