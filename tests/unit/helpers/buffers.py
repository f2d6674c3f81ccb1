"""Random plans between random tensors inside small buffers, with every byte that they move.

The addresses come from element coordinates, one at a time, and from nothing that the core computed
but the ranks that a plan reads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from engines import make_engine

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Plan, Route

DIM = 2
LAYOUTS = [
    "KBNHD",
    "KBHND",
    "BKNHD",
    "BNHC",
    "BHNC",
    "NBHC",
    "HBNC",
    "KNBHD",
    "BNHD",
    "LBNHC",
    "BLKNHD",
    "NLBHC",
    "BKLNHD",
    "HNBD",
    "LBKHND",
]


@dataclass
class Move:
    """One byte: where it is read and where it is written."""

    source_rank: int
    source_tensor: int
    source_offset: int
    target_tensor: int
    target_offset: int
    read: int
    written: int


@dataclass
class Case:
    """A plan with the caches to run it on; addresses are those of bytes in memory."""

    plan: Plan
    target_rank: int
    sources: list
    target: KVCache
    moves: list


def random_case(rng: random.Random, source_buffer: Any, target_buffer: Any) -> Case | None:
    """Plan something between tensors in these buffers; `None` where they have no room."""
    heads, layers, blocks = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([2, 3, 5])
    group = AttentionGroup(range(layers), num_kv_heads=heads, head_dim=DIM, dtype="uint8")
    source, target = (
        _random_engine(rng, name, ModelSpec((group,))) for name in ("source", "target")
    )
    source_tensors = [
        _random_tensors(rng, source_buffer, source, rank, blocks)
        for rank in range(source.num_ranks)
    ]
    target_rank = rng.randrange(target.num_ranks)
    target_tensors = _random_tensors(rng, target_buffer, target, target_rank, blocks)
    if None in source_tensors or target_tensors is None:
        return None
    tokens = rng.randint(1, min(source.tokens_per_block, target.tokens_per_block) * (blocks - 1))
    begin = rng.randrange(tokens)
    source_ids = [rng.randrange(blocks) for _ in range(-(-tokens // source.tokens_per_block))]
    if rng.random() < 0.3:
        source_ids = list(range(blocks))
    target_ids = rng.sample(range(blocks), -(-tokens // target.tokens_per_block))
    plan = Route(source, target).plan(
        target_rank, [source_ids], [target_ids], tokens=(begin, tokens)
    )
    moves = []
    for layer, plane, token in np.ndindex(layers, 2, tokens):
        if token < begin:
            continue
        for head in held_heads(heads, target.tp_size, target_rank):
            holders = (
                rank
                for rank in plan.source_ranks
                if head in held_heads(heads, source.tp_size, rank)
            )
            (source_rank,) = holders
            read = _place(
                source,
                source_rank,
                source_tensors[source_rank],
                source_ids,
                layer,
                plane,
                token,
                head,
            )
            written = _place(
                target, target_rank, target_tensors, target_ids, layer, plane, token, head
            )
            moves += [
                Move(source_rank, *one[:2], *other[:2], one[2], other[2])
                for one, other in zip(read, written, strict=True)
            ]
    caches = [KVCache(source, rank, tensors) for rank, tensors in enumerate(source_tensors)]
    return Case(plan, target_rank, caches, KVCache(target, target_rank, target_tensors), moves)


def held_heads(heads: int, tp_size: int, rank: int) -> range:
    """Heads of a TP rank: an even share, or one replica."""
    first = rank * heads // tp_size
    return range(first, (rank + 1) * heads // tp_size if tp_size <= heads else first + 1)


def _random_engine(rng: random.Random, name: str, model: ModelSpec) -> EngineSpec:
    tokens, layout = rng.choice([1, 2, 3, 4]), rng.choice(LAYOUTS)
    return make_engine(name, model, tokens, layout, tp_size=rng.choice([1, 1, 2]))


def _random_tensors(
    rng: random.Random, buffer: Any, engine: EngineSpec, rank: int, blocks: int
) -> list | None:
    shapes = [slot.shape(blocks) for slot in engine.tensor_slots(rank)]
    tensors = [_random_tensor(rng, buffer, shape) for shape in shapes]
    return None if any(tensor is None for tensor in tensors) else tensors


def _random_tensor(rng: random.Random, buffer: Any, shape: tuple[int, ...]) -> Any:
    """Return a view in memory order, with padding here and there, or `None` without room."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        is_innermost = axis == len(shape) - 1
        strides[axis] = step + (0 if is_innermost else rng.choice([0, 0, 0, 1, step]))
        step += strides[axis] * (shape[axis] - 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if extent > len(buffer):
        return None
    begin = rng.randrange(0, len(buffer) - extent + 1, rng.choice([1, 1, 4, 8]))
    return np.lib.stride_tricks.as_strided(buffer[begin:], shape, strides)


def _place(
    engine: EngineSpec,
    rank: int,
    tensors: list,
    ids: list,
    layer: int,
    plane: int,
    token: int,
    head: int,
) -> list:
    """(tensor, offset, address) of each byte of one head's elements of one plane."""
    heads = engine.model.groups[0].num_kv_heads
    block, slot = divmod(token, engine.tokens_per_block)
    for index, described in enumerate(engine.tensor_slots(rank)):
        if layer not in described.layers or "KV"[plane] not in described.planes:
            continue
        at = {
            "L": described.layers.index(layer),
            "B": ids[block],
            "K": plane,
            "N": slot,
            "H": head - held_heads(heads, engine.tp_size, rank)[0],
        }
        *outer, inner = described.layout
        *steps, _ = tensors[index].strides
        offset = sum(at[axis] * step for axis, step in zip(outer, steps, strict=True))
        offset += plane * DIM if inner == "C" else 0
        address = tensors[index].ctypes.data + offset
        return [(index, offset + dim, address + dim) for dim in range(DIM)]
    raise AssertionError("no tensor holds this element")
