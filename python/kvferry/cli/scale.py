"""The demo's two engines, with as many layers as fit in memory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import msgspec

from kvferry import EngineSpec, ModelSpec, StateGroup

GIB = 1 << 30
# Every engine has blocks that other requests hold; an eighth more shows that they stay untouched.
SPARE_BLOCKS = 8


def fit(model: ModelSpec, arguments: argparse.Namespace) -> ModelSpec:
    """Return the model with as many of its first layers as the memory limit allows."""
    num_layers = 1 + max(max(group.layers) for group in model.groups)
    low, high = 0, num_layers
    while low < high:
        middle = (low + high + 1) // 2
        if cache_bytes(first_layers(model, middle), arguments) <= arguments.max_gib * GIB:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        needed = cache_bytes(first_layers(model, 1), arguments) / GIB
        raise ValueError(f"one layer takes {needed:.2f} GiB, --max-gib allows {arguments.max_gib}")
    return first_layers(model, low)


def first_layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Return the model without the layers from `num_layers` on."""
    kept = [
        msgspec.structs.replace(
            group, layers=tuple(layer for layer in group.layers if layer < num_layers)
        )
        for group in model.groups
        if min(group.layers) < num_layers
    ]
    return ModelSpec(groups=tuple(kept), name=model.name)


def cache_bytes(model: ModelSpec, arguments: argparse.Namespace) -> int:
    """Return the bytes of all ranks' tensors of both engines."""
    return sum(
        tensor_bytes(engine, arguments.tokens, blocks_of) for engine in engines(model, arguments)
    )


def tensor_bytes(
    engine: EngineSpec, tokens: int, blocks: Callable[[EngineSpec, int, int], int]
) -> int:
    """Return the bytes that so many blocks of each group take in all ranks' tensors."""
    return sum(
        math.prod(slot.shape(blocks(engine, slot.group, tokens))) * slot.item_bytes
        for rank in range(engine.num_ranks)
        for slot in engine.tensor_slots(rank)
    )


def engines(model: ModelSpec, arguments: argparse.Namespace) -> tuple[EngineSpec, EngineSpec]:
    """Return the source and the target that the command line describes."""
    source = EngineSpec(
        "source",
        model,
        tokens_per_block=arguments.source_block,
        layout=arguments.source_layout,
        tp_size=arguments.source_tp,
    )
    target = EngineSpec(
        "target",
        model,
        tokens_per_block=arguments.target_block,
        layout=arguments.target_layout,
        tp_size=arguments.target_tp,
    )
    return source, target


def blocks_of(engine: EngineSpec, group: int, tokens: int) -> int:
    """Return the blocks of a group's tensors: the request's, and some of others'."""
    needed = blocks_needed(engine, group, tokens)
    return needed + -(-needed // SPARE_BLOCKS)


def blocks_needed(engine: EngineSpec, group: int, tokens: int) -> int:
    """Return the blocks of a group that a request of `tokens` tokens takes; one for a state."""
    if isinstance(engine.model.groups[group], StateGroup):
        return 1
    assert isinstance(engine.tokens_per_block, int)  # as `engines` made it
    return -(-tokens // engine.tokens_per_block)
