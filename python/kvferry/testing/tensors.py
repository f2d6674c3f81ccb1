"""Registered tensors: which a rank has, their shapes, and one view for all layouts.

This module owns the arithmetic of the contract's sections on layouts and registered tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .addresses import (
    DTYPE_BITS,
    has_heads,
    has_tokens,
    layers_of_stage,
    part_of,
    per_group,
    physical_blocks,
    planes_of,
    row_bytes,
    sharded_axis,
    slot_axis_tokens,
    split_rank,
    units_of_rank,
)
from .memory import bytes_of

__all__ = [
    "Slot",
    "as_slot_bytes",
    "axes_of",
    "axis_names",
    "plane_rows",
    "slots",
    "tensor_shape",
]

SHORTHANDS = {"NHD": "KBNHD", "HND": "KBHND"}
STATE_AXES = "BS"


@dataclass(frozen=True)
class Slot:
    """One registered tensor of a rank: which layers and planes of which group it holds."""

    group: int
    layers: tuple[int, ...]
    planes: tuple[str, ...]


def axes_of(engine: Any, g: int) -> str:
    """Return the axis letters of group `g`'s tensors, memory order, shorthands spelled out.

    Those of a state group are `"BS"`, where `S` stands for all axes of the part.
    """
    group = engine.model.groups[g]
    if not has_tokens(group):
        return STATE_AXES
    is_single = not isinstance(engine.layout, list | tuple)
    if is_single and not has_heads(group):
        return "BND"
    layout = str(per_group(engine.layout, g))
    return SHORTHANDS.get(layout, layout)


def axis_names(engine: Any, slot: Slot) -> list[str]:
    """Return one name a dimension of the slot's tensor; a part's axes are numbered."""
    group = engine.model.groups[slot.group]
    if has_tokens(group):
        return list(axes_of(engine, slot.group))
    return ["B", *(str(axis) for axis in range(len(part_of(group, slot.planes[0]).shape)))]


def slots(engine: Any, rank: int) -> list[Slot]:
    """Return the tensors that `rank` registers, in registration order."""
    stage = layers_of_stage(engine, split_rank(engine, rank)[0])
    result: list[Slot] = []
    for g, group in enumerate(engine.model.groups):
        axes = axes_of(engine, g)
        layers = tuple(layer for layer in sorted(group.layers) if layer in stage)
        if not layers:
            continue
        planes = planes_of(group)
        together = has_heads(group) and ("K" in axes or "C" in axes)
        spans = [layers] if "L" in axes else [(layer,) for layer in layers]
        plane_sets = [planes] if together else [(plane,) for plane in planes]
        result += [Slot(g, span, plane_set) for span in spans for plane_set in plane_sets]
    return result


def tensor_shape(engine: Any, rank: int, slot: Slot, num_blocks: int) -> tuple[int, ...]:
    """Return the slot's shape in memory order, with the innermost size in bytes.

    `num_blocks` counts the engine's block ids (state slots), each of which may stand for several
    blocks of the tensor.
    """
    group = engine.model.groups[slot.group]
    held = len(units_of_rank(engine, slot.group, slot.planes[0], rank))
    if not has_tokens(group):
        part = part_of(group, slot.planes[0])
        sizes = list(part.shape)
        sharded = sharded_axis(group, part.name)
        if sharded is not None:
            sizes[sharded[0]] = held * sharded[1]
        return (num_blocks, *sizes[:-1], sizes[-1] * DTYPE_BITS[part.dtype] // 8)
    by_letter = {
        "L": len(slot.layers),
        "B": num_blocks * physical_blocks(engine, slot.group),
        "K": 2,
        "N": slot_axis_tokens(engine, slot.group),
        "H": held,
        "D": row_bytes(group, slot.planes[0]),
        "C": sum(row_bytes(group, plane) for plane in slot.planes),
    }
    return tuple(by_letter[letter] for letter in axes_of(engine, slot.group))


def plane_rows(engine: Any, slot: Slot, tensor: np.ndarray, layer: int, plane: str) -> np.ndarray:
    """Return one layer's plane of a `uint8` tensor in memory order: [blocks, N, units, *row].

    Whatever the layout, this is the view in which the reference reads and writes. A row is flat
    bytes, or what a unit of a state part has of the part's axes, the innermost one in bytes.
    A state has one entry along `N`.
    """
    group = engine.model.groups[slot.group]
    if not has_tokens(group):
        return _state_rows(group, plane, tensor)
    axes = axes_of(engine, slot.group)
    index: list[Any] = [slice(None)] * len(axes)
    if "L" in axes:
        index[axes.index("L")] = slot.layers.index(layer)
    if "K" in axes:
        index[axes.index("K")] = "KV".index(plane)
    if "C" in axes:
        split = row_bytes(group, "K")
        index[axes.index("C")] = slice(0, split) if plane == "K" else slice(split, None)
    left = [letter for letter in axes if letter not in "LK"]
    view = tensor[tuple(index)]
    if "H" not in left:
        view, left = view[None], ["H", *left]
    order = [left.index("B"), left.index("N"), left.index("H"), len(left) - 1]
    rows: np.ndarray = view.transpose(order)
    return rows


def _state_rows(group: Any, plane: str, tensor: np.ndarray) -> np.ndarray:
    """Cut the sharded axis into (unit, elements of a unit), and move the units forward."""
    sharded = sharded_axis(group, plane)
    if sharded is None:
        return tensor[:, None, None]
    axis, per_unit = sharded[0] + 1, sharded[1]
    if axis == tensor.ndim - 1:
        per_unit = per_unit * DTYPE_BITS[part_of(group, plane).dtype] // 8
    shape, strides = list(tensor.shape), list(tensor.strides)
    shape[axis : axis + 1] = [shape[axis] // per_unit, per_unit]
    strides[axis : axis + 1] = [strides[axis] * per_unit, strides[axis]]
    cut = as_strided(tensor, shape=shape, strides=strides)
    return np.moveaxis(cut, axis, 1)[:, None]


def as_slot_bytes(engine: Any, rank: int, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the tensors as `uint8`, once their number and shapes are those of the rank's slots."""
    rank_slots = slots(engine, rank)
    if len(tensors) != len(rank_slots):
        raise ValueError(
            f"rank {rank} takes one tensor a slot, {len(rank_slots)} in all, got {len(tensors)}"
        )
    result = [bytes_of(tensor) for tensor in tensors]
    for i, (slot, tensor) in enumerate(zip(rank_slots, result, strict=True)):
        names = axis_names(engine, slot)
        shape = list(tensor_shape(engine, rank, slot, 0))
        if len(names) == tensor.ndim:
            shape[names.index("B")] = tensor.shape[names.index("B")]
        if list(tensor.shape) != shape:
            raise ValueError(f"tensor {i} ({names}) has byte shape {tensor.shape}, not {shape}")
        if tensors[i].shape[-1] > 1 and tensors[i].strides[-1] != tensors[i].itemsize:
            raise ValueError(f"tensor {i} ({names}) is not contiguous along its last axis")
    return result
