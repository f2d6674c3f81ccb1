"""Memory for a side's tensors, as engines have it: padded, interleaved, shared between groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .addresses import DTYPE_BITS, has_tokens, part_of, physical_blocks
from .scenario import Side
from .tensors import Slot, axes_of, axis_names, slots, tensor_shape

__all__ = ["allocate", "axes_handed_over", "item_bytes"]

# Items by which a stride may exceed the least, plus one.
MAX_PADDING = 4


def item_bytes(engine: Any, slot: Slot) -> int:
    """Return the item size of a slot's tensor; two elements of half a byte make an item."""
    group = engine.model.groups[slot.group]
    dtype = group.dtype if has_tokens(group) else part_of(group, slot.planes[0]).dtype
    return max(8, DTYPE_BITS[dtype]) // 8


def allocate(
    side: Side, rank: int, rng: random.Random, num_blocks: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Return a rank's tensors in slot order, dimensions in memory order, filled with zeros.

    Parameters
    ----------
    side
        The engine, and how many block ids a group the tensors have room for.
    rank
        Global rank.
    rng
        Decides what memory lies behind the tensors: they may be padded, begin anywhere, be
        interleaved in one allocation, have a few blocks more than ids, or, where `side.aliased`,
        share memory between groups.
    num_blocks
        Block ids a group for dense tensors of exactly that size instead.

    Examples
    --------
    >>> from kvferry import AttentionGroup, EngineSpec, ModelSpec
    >>> model = ModelSpec((AttentionGroup((0,), num_kv_heads=2, head_dim=4),))
    >>> engine = EngineSpec("engine", model, tokens_per_block=16, layout="KBNHD")
    >>> allocate(Side(engine, ([0],)), 0, random.Random(0), num_blocks=[3])[0].shape
    (2, 3, 16, 2, 4)
    """
    engine, rank_slots = side.engine, slots(side.engine, rank)
    counts = side.num_blocks if num_blocks is None else num_blocks
    shapes, kinds = [], []
    for slot in rank_slots:
        shape = list(tensor_shape(engine, rank, slot, counts[slot.group]))
        size = item_bytes(engine, slot)
        shape[-1] //= size
        if num_blocks is None:
            names, physical = axis_names(engine, slot), physical_blocks(engine, slot.group)
            shape[names.index("B")] += rng.randrange(physical)
        shapes.append(tuple(shape))
        kinds.append(np.dtype(f"u{size}"))
    if num_blocks is not None:
        return [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    tensors = _interleaved(rng, shapes, kinds) if rng.random() < 0.25 else None
    if tensors is None:
        padded = rng.random() < 0.6
        tensors = [
            _padded(rng, shape, kind, padded) for shape, kind in zip(shapes, kinds, strict=True)
        ]
    return _aliased(engine, rank_slots, tensors) if side.aliased else tensors


def _padded(
    rng: random.Random, shape: tuple[int, ...], kind: np.dtype[Any], padded: bool
) -> np.ndarray:
    """Return a tensor whose every stride may be a little larger than it has to be."""
    strides: list[int] = []
    span = 1
    for size in reversed(shape):
        strides.insert(0, span)
        span *= size
        if padded and rng.random() < 0.4:
            span += rng.randrange(MAX_PADDING)
    start = rng.randrange(8)
    memory = np.zeros(start + span, kind)
    item_strides = [stride * kind.itemsize for stride in strides]
    return as_strided(memory[start:], shape=shape, strides=item_strides)


def _interleaved(
    rng: random.Random, shapes: Sequence[tuple[int, ...]], kinds: Sequence[np.dtype[Any]]
) -> list[np.ndarray] | None:
    """Return tensors that take turns along their outermost axis, where theirs are all alike."""
    if len({shape[0] for shape in shapes}) != 1 or len(set(kinds)) != 1:
        return None
    inner = [math.prod(shape[1:]) for shape in shapes]
    turn = sum(inner) + rng.randrange(MAX_PADDING)
    memory = np.zeros((shapes[0][0], turn), kinds[0])
    tensors, begin = [], 0
    for shape, size in zip(shapes, inner, strict=True):
        part = memory[:, begin : begin + size]
        steps = [math.prod(shape[axis + 1 :]) * memory.itemsize for axis in range(len(shape))]
        strides = [memory.strides[0], *steps[1:]]
        tensors.append(as_strided(part, shape=shape, strides=strides))
        begin += size
    return tensors


def _aliased(
    engine: Any, rank_slots: Sequence[Slot], tensors: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Let groups share tensors of equal shape and type, as hybrid engines do.

    One id must be the same bytes in both, so it must stand for as many blocks of the tensor.
    """
    turns: Counter[Any] = Counter()
    first: dict[Any, np.ndarray] = {}
    result = []
    for slot, tensor in zip(rank_slots, tensors, strict=True):
        axis = axis_names(engine, slot).index("B")
        likeness = (tensor.shape, axis, tensor.dtype.str, physical_blocks(engine, slot.group))
        key = (*likeness, turns[(slot.group, *likeness)])
        turns[(slot.group, *likeness)] += 1
        result.append(first.setdefault(key, tensor))
    return result


def axes_handed_over(
    side: Side, rank: int, tensors: Sequence[np.ndarray], rng: random.Random
) -> tuple[list[np.ndarray], str | tuple[str, ...]]:
    """Return the tensors with dimensions in other orders than memory's, and the names of those.

    The names are what `KVCache` takes as its `axes`.
    """
    engine = side.engine
    memory = [axes_of(engine, g) for g in range(len(engine.model.groups))]
    names = [
        "".join(rng.sample(letters, len(letters))) if side.has_tokens(g) else letters
        for g, letters in enumerate(memory)
    ]
    views = []
    for slot, tensor in zip(slots(engine, rank), tensors, strict=True):
        if side.has_tokens(slot.group):
            order = [memory[slot.group].index(letter) for letter in names[slot.group]]
            tensor = tensor.transpose(order)
        views.append(tensor)
    return views, names[0] if len(names) == 1 else tuple(names)
