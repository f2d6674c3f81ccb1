"""Small models, engines and tensors for tests, with numbers that fit a reader's head."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvferry import (
    AttentionGroup,
    EngineSpec,
    KVCache,
    LatentGroup,
    ModelSpec,
    StateGroup,
    StatePart,
)

# Element types do not matter to a mover of bytes, so every tensor is an unsigned integer one.
ITEM_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
UNTOUCHED = 0xEE
# Of the model and engine that are made where nothing else is said.
TOKEN_BYTES = 2 * 2 * 4 * 2
BLOCK_BYTES = 4 * TOKEN_BYTES


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
    """Make an engine, of four tokens a block unless said otherwise."""
    return EngineSpec(name, model or attention_model(), tokens, layout, **fields)


def counting_tensors(engine: EngineSpec, rank: int = 0, blocks: int = 10, start: int = 1) -> list:
    """Tensors whose items all differ as far as their width allows."""
    tensors = []
    for slot in engine.tensor_slots(rank):
        shape, item = slot.shape(blocks), ITEM_TYPES[slot.item_bytes]
        count = int(np.prod(shape))
        # Wraps around for narrow items; 251 is prime, so that no block repeats its neighbour.
        numbers = (np.arange(start, start + count) % (251 if item is np.uint8 else 65521)).astype(
            item
        )
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
    assert all(
        column.dtype == np.int64 and column.shape == (len(descriptors),) for column in columns
    )
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]


def planes(tensor: np.ndarray, layout: str) -> np.ndarray:
    """Show the tensor of one layer as [plane, block, token, head, dim], whatever its layout."""
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


def moved(plan: Any, source: EngineSpec, target: EngineSpec, blocks: int = 10) -> list:
    """Show each fragment as (source token, target token, tokens) of tensors with `TOKEN_BYTES`.

    Tokens count from the first of a tensor: slot 3 of block 7 is token 31 where blocks have 4.
    """
    fragments = plan.descriptors(source_cache(source, 0, blocks), target_cache(target, 0, blocks))
    return [
        (read // TOKEN_BYTES, written // TOKEN_BYTES, length // TOKEN_BYTES)
        for _, read, _, written, length in rows(fragments)
    ]


def engine_pair(source: Any = None, target: Any = None, **model: Any) -> tuple:
    """Make a source and a target of one model, each with fields of its own."""
    spec = attention_model(**model)
    return make_engine("source", spec, **(source or {})), make_engine(
        "target", spec, **(target or {})
    )


def hybrid_model() -> ModelSpec:
    """One group of each kind."""
    conv = StatePart("conv", shape=(3, 64), dtype="bfloat16", shard_axis=1)
    ssm = StatePart("ssm", shape=(8, 16, 4), dtype="float32", shard_axis=0, shard_units=4)
    return ModelSpec(
        groups=(
            AttentionGroup((0, 3), num_kv_heads=4, head_dim=8, v_head_dim=6, sliding_window=128),
            LatentGroup((1,), latent_dim=576, dtype="float8_e4m3fn"),
            StateGroup((2, 4), parts=(conv, ssm)),
        ),
        name="hybrid",
    )


def hybrid_engine() -> EngineSpec:
    """Per-group values wherever there can be some."""
    return EngineSpec(
        "hybrid",
        hybrid_model(),
        tokens_per_block=(64, 16, 0),
        layout=("BNHC", "BND", "BS"),
        tp_size=2,
        head_ranges=(((0, 3), (1, 4)), None, None),
        null_block_id=(0, None, -1),
        physical_blocks_per_block=(4, 1, 1),
        num_blocks=(100, None, 7),
    )


def label(value: Any) -> str:
    """Name a test case after its value: short, and the same in every run."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}"
