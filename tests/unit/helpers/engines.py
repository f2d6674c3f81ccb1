"""Small models, engines and tensors for tests, with numbers that fit a reader's head."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec

# Element types do not matter to a mover of bytes, so every tensor is an unsigned integer one.
ITEM_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
UNTOUCHED = 0xEE


def attention_model(layers: int = 1, heads: int = 2, dim: int = 4, **fields: Any) -> ModelSpec:
    """One attention group of 2-byte elements."""
    fields = {"dtype": "float16", **fields}
    return ModelSpec((AttentionGroup(range(layers), heads, dim, **fields),))


def make_engine(
    name: str = "source",
    model: ModelSpec | None = None,
    tokens: Any = 4,
    layout: Any = "BNHC",
    **fields: Any,
) -> EngineSpec:
    """An engine of four tokens a block unless said otherwise."""
    return EngineSpec(name, model or attention_model(), tokens, layout, **fields)


def counting_tensors(engine: EngineSpec, rank: int = 0, blocks: int = 10, start: int = 1) -> list:
    """Tensors whose items all differ as far as their width allows."""
    tensors = []
    for slot in engine.tensor_slots(rank):
        shape, item = slot.shape(blocks), ITEM_TYPES[slot.item_bytes]
        count = int(np.prod(shape))
        # Wraps around for narrow items; 251 is prime, so that no block repeats its neighbour.
        numbers = (np.arange(start, start + count) % (251 if item is np.uint8 else 65521)).astype(item)
        tensors.append(numbers.reshape(shape))
        start += count
    return tensors


def untouched_tensors(engine: EngineSpec, rank: int = 0, blocks: int = 10) -> list:
    """Tensors that are all `UNTOUCHED` bytes, so that every write shows."""
    tensors = []
    for slot in engine.tensor_slots(rank):
        shape, item = slot.shape(blocks), ITEM_TYPES[slot.item_bytes]
        raw = np.full(int(np.prod(shape)) * slot.item_bytes, UNTOUCHED, np.uint8)
        tensors.append(raw.view(item).reshape(shape))
    return tensors


def source_cache(engine: EngineSpec, rank: int = 0, blocks: int = 10) -> KVCache:
    return KVCache(engine, rank, counting_tensors(engine, rank, blocks))


def target_cache(engine: EngineSpec, rank: int = 0, blocks: int = 10) -> KVCache:
    return KVCache(engine, rank, untouched_tensors(engine, rank, blocks))


def is_untouched(array: np.ndarray) -> bool:
    return bool((np.ascontiguousarray(array).view(np.uint8) == UNTOUCHED).all())


def rows(descriptors: Any) -> list[tuple[int, int, int, int, int]]:
    """(source tensor, source offset, target tensor, target offset, length), in their order."""
    columns = (
        descriptors.source_tensor,
        descriptors.source_offset,
        descriptors.target_tensor,
        descriptors.target_offset,
        descriptors.length,
    )
    assert all(column.dtype == np.int64 and column.shape == (len(descriptors),) for column in columns)
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]


def planes(tensor: np.ndarray, layout: str) -> np.ndarray:
    """The tensor of one layer as [plane, block, token, head, dim], whatever its layout."""
    if layout == "KBNHD":
        return tensor
    if layout == "KBHND":
        return tensor.transpose(0, 1, 3, 2, 4)
    if layout == "BKNHD":
        return tensor.transpose(1, 0, 2, 3, 4)
    content = {"BNHC": tensor, "BHNC": tensor.transpose(0, 2, 1, 3)}[layout]
    return np.stack(np.split(content, 2, axis=-1))


def tokens_of(tensor: np.ndarray, layout: str, ids: Any) -> np.ndarray:
    """[plane, token, head, dim] of a list of blocks, the blocks one after another."""
    picked = planes(tensor, layout)[:, list(ids)]
    return picked.reshape(2, -1, *picked.shape[3:])
