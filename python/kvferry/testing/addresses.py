"""Where a cache element lives: specs read as functions from an element to rank, tensor and place.

This module owns the arithmetic of the contract's sections on layouts, specs and registered
tensors. It is written to be obvious, not fast, and it reads specs by attribute name only: any
object that has the attributes will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Slot",
    "axes_of",
    "block_ids_at",
    "caches_layer",
    "group_of_layer",
    "head_range",
    "holders",
    "holds",
    "null_block_id",
    "per_group",
    "plane_rows",
    "require_supported",
    "row_bytes",
    "slot_axis_tokens",
    "slots",
    "tensor_shape",
    "tokens_per_block",
]

DTYPE_BITS = {
    "float4_e2m1fn_x2": 4,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "int8": 8,
    "uint8": 8,
    "bfloat16": 16,
    "float16": 16,
    "int16": 16,
    "float32": 32,
    "int32": 32,
    "float64": 64,
    "int64": 64,
}
SHORTHANDS = {"NHD": "KBNHD", "HND": "KBHND"}


@dataclass(frozen=True)
class Slot:
    """One registered tensor of a rank: which layers and planes of which group it holds."""

    group: int
    layers: tuple[int, ...]
    planes: tuple[str, ...]


def require_supported(engine: Any) -> None:
    """Refuse, by name, what this reference does not model."""
    if engine.pp_size != 1:
        raise NotImplementedError(f"pp_size={engine.pp_size}: the reference knows one stage only")
    if engine.cp_size != 1:
        raise NotImplementedError(f"cp_size={engine.cp_size}: the reference knows CP size 1 only")
    for g, group in enumerate(engine.model.groups):
        if not hasattr(group, "num_kv_heads"):
            raise NotImplementedError(f"{type(group).__name__} (group {g}): attention groups only")
        physical = per_group(engine.physical_blocks_per_block, g)
        if physical != 1:
            raise NotImplementedError(f"physical_blocks_per_block={physical} of group {g}")


def per_group(value: Any, g: int) -> Any:
    """Return group `g`'s value of a field that is given once or as one entry a group."""
    return value[g] if isinstance(value, list | tuple | np.ndarray) else value


def tokens_per_block(engine: Any, g: int) -> int:
    """Return the tokens that one of group `g`'s block ids covers."""
    return int(per_group(engine.tokens_per_block, g))


def null_block_id(engine: Any, g: int) -> int | None:
    """Return the id that stands for no block in group `g`; `None` where there is none."""
    null = per_group(engine.null_block_id, g)
    return None if null is None else int(null)


def axes_of(engine: Any, g: int) -> str:
    """Return the axis letters of group `g`'s tensors, memory order, shorthands spelled out."""
    layout = str(per_group(engine.layout, g))
    return SHORTHANDS.get(layout, layout)


def row_bytes(group: Any, plane: str) -> int:
    """Return the bytes of one head's key (`"K"`) or value (`"V"`) of one token."""
    value_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
    elements = group.head_dim if plane == "K" else value_dim
    return int(elements) * DTYPE_BITS[group.dtype] // 8


def caches_layer(engine: Any, layer: int) -> bool:
    """Say whether any group of the engine caches `layer`."""
    return any(layer in group.layers for group in engine.model.groups)


def group_of_layer(engine: Any, layer: int) -> int:
    """Return the group that caches `layer`."""
    return next(g for g, group in enumerate(engine.model.groups) if layer in group.layers)


def head_range(engine: Any, g: int, rank: int) -> range:
    """Return the KV heads of group `g` that `rank` holds."""
    heads, tp_size = engine.model.groups[g].num_kv_heads, engine.tp_size
    splits = engine.head_ranges
    if splits is not None:
        first_entry = next(entry for entry in splits if entry is not None)
        split = splits if isinstance(first_entry[0], int) else splits[g]
        if split is not None:
            return range(*split[rank])
    if tp_size <= heads:
        return range(rank * heads // tp_size, (rank + 1) * heads // tp_size)
    return range(rank * heads // tp_size, rank * heads // tp_size + 1)


def holds(engine: Any, rank: int, g: int, layer: int, head: int) -> bool:
    """Say whether `rank` holds the cache elements of (layer, head); `layer` is one of group `g`."""
    return layer in engine.model.groups[g].layers and head in head_range(engine, g, rank)


def holders(engine: Any, g: int, layer: int, head: int) -> list[int]:
    """Return every rank that holds the elements of (layer, head), ascending."""
    return [rank for rank in range(engine.tp_size) if holds(engine, rank, g, layer, head)]


def slots(engine: Any, rank: int) -> list[Slot]:
    """Return the tensors that `rank` registers, in registration order."""
    require_supported(engine)
    if not 0 <= rank < engine.tp_size:
        raise ValueError(f"rank {rank} is outside [0, {engine.tp_size})")
    result: list[Slot] = []
    for g, group in enumerate(engine.model.groups):
        axes = axes_of(engine, g)
        layers = tuple(sorted(group.layers))
        both_planes = "K" in axes or "C" in axes
        spans = [layers] if "L" in axes else [(layer,) for layer in layers]
        plane_sets = [("K", "V")] if both_planes else [("K",), ("V",)]
        result += [Slot(g, span, planes) for span in spans for planes in plane_sets]
    return result


def slot_axis_tokens(engine: Any, g: int) -> int:
    """Return the size of the `N` axis of group `g`'s tensors."""
    return tokens_per_block(engine, g) // int(engine.model.groups[g].tokens_per_slot)


def tensor_shape(engine: Any, rank: int, slot: Slot, num_blocks: int) -> tuple[int, ...]:
    """Return the slot's shape in memory order, with the innermost size in bytes."""
    group = engine.model.groups[slot.group]
    sizes = {
        "L": len(slot.layers),
        "B": num_blocks,
        "K": 2,
        "N": slot_axis_tokens(engine, slot.group),
        "H": len(head_range(engine, slot.group, rank)),
        "D": row_bytes(group, slot.planes[0]),
        "C": row_bytes(group, "K") + row_bytes(group, "V"),
    }
    return tuple(sizes[letter] for letter in axes_of(engine, slot.group))


def plane_rows(engine: Any, slot: Slot, tensor: np.ndarray, layer: int, plane: str) -> np.ndarray:
    """Return one layer's plane of a `uint8` tensor in memory order: [blocks, N, heads, row bytes].

    Whatever the layout, this is the view in which the reference reads and writes.
    """
    axes = axes_of(engine, slot.group)
    index: list[Any] = [slice(None)] * len(axes)
    if "L" in axes:
        index[axes.index("L")] = slot.layers.index(layer)
    if "K" in axes:
        index[axes.index("K")] = "KV".index(plane)
    if "C" in axes:
        split = row_bytes(engine.model.groups[slot.group], "K")
        index[axes.index("C")] = slice(0, split) if plane == "K" else slice(split, None)
    left = [letter for letter in axes if letter not in "LK"]
    order = [left.index("B"), left.index("N"), left.index("H"), len(left) - 1]
    rows: np.ndarray = tensor[tuple(index)].transpose(order)
    return rows


def block_ids_at(
    engine: Any, g: int, blocks: Sequence[Any], first_token: Any, tokens: np.ndarray
) -> list[int | None]:
    """Return, for each of `tokens`, the listed id that covers it; `None` where the list doesn't."""
    ids = [int(block) for block in blocks[g]]
    indices = (tokens - per_group(first_token, g)) // tokens_per_block(engine, g)
    return [ids[i] if 0 <= i < len(ids) else None for i in indices.tolist()]
