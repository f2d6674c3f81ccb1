"""Where a cache element lives: specs read as functions from an element to rank, tensor and place.

An element is named by group, layer, plane (`"K"`, `"V"`, `"latent"` or a state part's name), unit
and token. Units are what tensor parallelism deals out: KV heads, or a state part's units; what
every TP rank holds is the one unit 0. A state has no token; wherever one is asked for, it is 0.

This module owns the arithmetic of the contract's section on specs. It is written to be obvious,
not fast, and it reads specs by attribute name only: any object that has the attributes will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = [
    "DTYPE_BITS",
    "block_ids_at",
    "cp_ranks",
    "find_group",
    "has_heads",
    "has_tokens",
    "holders",
    "layers_of_stage",
    "null_block_id",
    "num_ranks",
    "num_units",
    "part_of",
    "per_group",
    "physical_blocks",
    "places",
    "planes_of",
    "rank_of",
    "ranks",
    "row_bytes",
    "sharded_axis",
    "slot_axis_tokens",
    "split_rank",
    "stage_of_layer",
    "state_slot",
    "tokens_per_block",
    "tokens_per_slot",
    "units_of_rank",
    "units_per_tp_rank",
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


def per_group(value: Any, g: int) -> Any:
    """Return group `g`'s value of a field that is given once or as one entry a group."""
    return value[g] if isinstance(value, list | tuple | np.ndarray) else value


def has_heads(group: Any) -> bool:
    """Say whether a group is one of attention with keys and values a head."""
    return hasattr(group, "num_kv_heads")


def has_tokens(group: Any) -> bool:
    """Say whether a group caches something a token (attention, latent); a state group does not."""
    return not hasattr(group, "parts")


def tokens_per_block(engine: Any, g: int) -> int:
    """Return the tokens that one of group `g`'s block ids covers, over all CP ranks."""
    return int(per_group(engine.tokens_per_block, g))


def tokens_per_slot(engine: Any, g: int) -> int:
    """Return the tokens that one `N` entry of group `g` stands for."""
    return int(engine.model.groups[g].tokens_per_slot)


def physical_blocks(engine: Any, g: int) -> int:
    """Return the consecutive tensor blocks that one of group `g`'s ids stands for."""
    if not has_tokens(engine.model.groups[g]):
        return 1
    return int(per_group(engine.physical_blocks_per_block, g))


def slot_axis_tokens(engine: Any, g: int) -> int:
    """Return the size of the `N` axis of group `g`'s tensors."""
    shares = engine.cp_size * physical_blocks(engine, g) * tokens_per_slot(engine, g)
    tokens = tokens_per_block(engine, g)
    if tokens % shares:
        raise ValueError(f"{tokens} tokens per block in {shares} shares")
    return int(tokens // shares)


def null_block_id(engine: Any, g: int) -> int | None:
    """Return the id that stands for no block (or state slot) in group `g`, `None` without one."""
    null = per_group(engine.null_block_id, g)
    return None if null is None else int(null)


def planes_of(group: Any) -> tuple[str, ...]:
    """Return the planes of a group: key and value, the latent, or the state's parts."""
    if not has_tokens(group):
        return tuple(part.name for part in group.parts)
    return ("K", "V") if has_heads(group) else ("latent",)


def part_of(group: Any, plane: str) -> Any:
    """Return the part of a state group that is named `plane`."""
    return next(part for part in group.parts if part.name == plane)


def num_units(group: Any, plane: str) -> int:
    """Return the units in which TP ranks hold a plane; 1 where every rank holds all of it."""
    if has_heads(group):
        return int(group.num_kv_heads)
    if has_tokens(group) or part_of(group, plane).shard_axis is None:
        return 1
    part = part_of(group, plane)
    return int(part.shape[part.shard_axis] if part.shard_units is None else part.shard_units)


def sharded_axis(group: Any, plane: str) -> tuple[int, int] | None:
    """Return a state part's sharded axis, and one unit's elements along it; `None`: replicated."""
    part = part_of(group, plane)
    if part.shard_axis is None:
        return None
    return int(part.shard_axis), int(part.shape[part.shard_axis]) // num_units(group, plane)


def row_bytes(group: Any, plane: str) -> int:
    """Return the bytes of one unit of a plane: of one token, or of one state."""
    if has_heads(group):
        value_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
        elements, dtype = (group.head_dim if plane == "K" else value_dim), group.dtype
    elif has_tokens(group):
        elements, dtype = group.latent_dim, group.dtype
    else:
        part = part_of(group, plane)
        elements, dtype = math.prod(part.shape) // num_units(group, plane), part.dtype
    return int(elements) * DTYPE_BITS[dtype] // 8


def find_group(engine: Any, layer: int, like: Any) -> int | None:
    """Return the group that caches `layer` in the way of the group `like`: tokens, or a state.

    A layer of a parallel hybrid has both. `None` where the engine caches no such thing.
    """
    for g, group in enumerate(engine.model.groups):
        if layer in group.layers and has_tokens(group) == has_tokens(like):
            return g
    return None


def num_ranks(engine: Any) -> int:
    """Return the number of an engine's global ranks."""
    return int(engine.pp_size * engine.tp_size * engine.cp_size)


def ranks(engine: Any) -> range:
    """Return an engine's global ranks."""
    return range(num_ranks(engine))


def rank_of(engine: Any, pp: int, tp: int, cp: int) -> int:
    """Return the global rank of a pipeline stage's TP and CP rank."""
    return int((pp * engine.tp_size + tp) * engine.cp_size + cp)


def split_rank(engine: Any, rank: int) -> tuple[int, int, int]:
    """Return pipeline stage, TP rank and CP rank of a global rank."""
    if not 0 <= rank < num_ranks(engine):
        raise ValueError(f"rank {rank} is outside [0, {num_ranks(engine)})")
    stage_and_tp, cp = divmod(rank, engine.cp_size)
    pp, tp = divmod(stage_and_tp, engine.tp_size)
    return pp, tp, cp


def layers_of_stage(engine: Any, pp: int) -> range:
    """Return the layer indices of pipeline stage `pp`, cached or not."""
    if engine.pp_layers is not None:
        return range(*engine.pp_layers[pp])
    num_layers = 1 + max(layer for group in engine.model.groups for layer in group.layers)
    per_stage, rest = divmod(num_layers, engine.pp_size)
    if rest:
        raise ValueError(f"{num_layers} layers on {engine.pp_size} stages need pp_layers")
    return range(pp * per_stage, (pp + 1) * per_stage)


def stage_of_layer(engine: Any, layer: int) -> int:
    """Return the pipeline stage that has `layer`."""
    return next(pp for pp in range(engine.pp_size) if layer in layers_of_stage(engine, pp))


def units_per_tp_rank(engine: Any, g: int, plane: str) -> list[range]:
    """Return the units of one of group `g`'s planes that each TP rank holds."""
    group = engine.model.groups[g]
    splits = engine.head_ranges if has_heads(group) else None
    if splits is not None:
        first_entry = next(entry for entry in splits if entry is not None)
        split = splits if isinstance(first_entry[0], int) else splits[g]
        if split is not None:
            return [range(*ends) for ends in split]
    units, tp_size = num_units(group, plane), engine.tp_size
    if tp_size <= units:
        return [range(r * units // tp_size, (r + 1) * units // tp_size) for r in range(tp_size)]
    return [range(r * units // tp_size, r * units // tp_size + 1) for r in range(tp_size)]


def units_of_rank(engine: Any, g: int, plane: str, rank: int) -> range:
    """Return the units of one of group `g`'s planes that a global rank holds."""
    return units_per_tp_rank(engine, g, plane)[split_rank(engine, rank)[1]]


def cp_ranks(engine: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the CP rank on which each of `tokens` lives.

    The contract counts from the block's start. That is a multiple of `cp_interleave * cp_size`,
    after which the ranks repeat, so one may as well count from the request's start.
    """
    ranks_of_tokens: np.ndarray = (tokens // engine.cp_interleave) % engine.cp_size
    return ranks_of_tokens


def places(
    engine: Any, g: int, ids: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensor blocks and `N` entries of tokens under their block ids.

    Both are those of the CP rank on which the token lives; tokens are counted from the request's
    start, and every block begins at a multiple of its size.
    """
    t = tokens % tokens_per_block(engine, g)
    interleave, cp_size = engine.cp_interleave, engine.cp_size
    on_rank = t // (interleave * cp_size) * interleave + t % interleave
    entries = on_rank // tokens_per_slot(engine, g)
    size = slot_axis_tokens(engine, g)
    return ids * physical_blocks(engine, g) + entries // size, entries % size


def holders(engine: Any, g: int, layer: int, plane: str, unit: int, token: int = 0) -> list[int]:
    """Return every rank that holds an element, ascending."""
    pp = stage_of_layer(engine, layer)
    having = units_per_tp_rank(engine, g, plane)
    if has_tokens(engine.model.groups[g]):
        cps = cp_ranks(engine, np.array([token])).tolist()
    else:
        cps = list(range(engine.cp_size))  # states are whole on every CP rank
    return [
        rank_of(engine, pp, tp, cp)
        for tp, units in enumerate(having)
        if unit in units
        for cp in cps
    ]


def block_ids_at(
    engine: Any, g: int, blocks: Sequence[Any], first_token: Any, tokens: np.ndarray
) -> list[int | None]:
    """Return, for each of `tokens`, the listed id that covers it; `None` where the list doesn't."""
    ids = [int(block) for block in blocks[g]]
    indices = (tokens - per_group(first_token, g)) // tokens_per_block(engine, g)
    return [ids[i] if 0 <= i < len(ids) else None for i in indices.tolist()]


def state_slot(engine: Any, g: int, blocks: Sequence[Any]) -> int | None:
    """Return the slot id that is given for a state group; `None` where there is none."""
    ids = [int(block) for block in blocks[g]]
    given = [block for block in ids if block != null_block_id(engine, g)]
    return given[0] if given else None


def held_planes(engine: Any, g: int, rank: int) -> Iterator[tuple[int, str]]:
    """Yield the (layer, plane) of group `g` of which a rank holds anything, layers ascending."""
    stage = layers_of_stage(engine, split_rank(engine, rank)[0])
    group = engine.model.groups[g]
    for layer in sorted(group.layers):
        if layer in stage:
            for plane in planes_of(group):
                yield layer, plane
