"""Which tokens are due, who moves them, and which requests must be refused.

This module owns the contract's section on plans, as far as it can be told without tensors. The
arguments are those of `Route.plan`: block ids a group, matched by token position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .addresses import (
    block_ids_at,
    caches_layer,
    group_of_layer,
    head_range,
    holders,
    null_block_id,
    per_group,
    require_supported,
    row_bytes,
    tokens_per_block,
)

__all__ = [
    "chosen_source",
    "due_tokens",
    "expected_bytes",
    "expected_error",
    "expected_pairs",
    "readers",
    "shared_layers",
    "source_groups",
]


def shared_layers(source: Any, target: Any, g: int) -> list[int]:
    """Return the layers of the target's group `g` that the source caches too, ascending."""
    layers = sorted(target.model.groups[g].layers)
    return [layer for layer in layers if caches_layer(source, layer)]


def source_groups(source: Any, target: Any, g: int) -> list[int]:
    """Return the source's groups that hold a layer of the target's group `g`."""
    return sorted({group_of_layer(source, layer) for layer in shared_layers(source, target, g)})


def due_tokens(
    source: Any,
    target: Any,
    g: int,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> np.ndarray:
    """Return the token positions of the target's group `g` that are due, ascending.

    That the source has none of the group's layers makes no difference: then tokens are due, and
    the target's list is checked, but nothing moves.
    """
    begin, end = tokens
    window = target.model.groups[g].sliding_window
    due: np.ndarray = np.arange(begin, end)
    due = due[due >= per_group(target_first_token, g)]
    if window > 0:
        due = due[due >= end - window]
    null = null_block_id(target, g)
    if null is not None:
        ids = block_ids_at(target, g, target_blocks, target_first_token, due)
        due = due[np.array([block != null for block in ids], bool)]
    return due


def expected_error(
    source: Any,
    target: Any,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> frozenset[str]:
    """Return the names of the errors that may answer this request; empty for a good request.

    Where several things are wrong with a request, each one's error is acceptable.
    """
    require_supported(source)
    require_supported(target)
    begin, end = tokens
    names = set()
    if begin < 0 or end < 0 or begin > end:
        names.add("ValueError")
    sides = [
        (source, source_blocks, source_first_token),
        (target, target_blocks, target_first_token),
    ]
    for engine, blocks, first_token in sides:
        if len(blocks) != len(engine.model.groups):
            return frozenset({"ValueError"})
        for g in range(len(engine.model.groups)):
            names |= _group_errors(engine, g, blocks, tokens, first_token)
    for g in range(len(target.model.groups)):
        due = due_tokens(
            source, target, g, source_blocks, target_blocks, tokens,
            source_first_token, target_first_token,
        )  # fmt: skip
        names |= _target_list_errors(target, g, target_blocks, target_first_token, due)
        for source_group in source_groups(source, target, g):
            ids = block_ids_at(source, source_group, source_blocks, source_first_token, due)
            null = null_block_id(source, source_group)
            if None in ids or (null is not None and null in ids):
                names.add("BlockRangeError")
    return frozenset(names)


def _group_errors(
    engine: Any, g: int, blocks: Sequence[Any], tokens: tuple[int, int], first_token: Any
) -> set[str]:
    """Return what is wrong with one group's list and offset, whatever is due."""
    names = set()
    first = per_group(first_token, g)
    if first < 0:
        names.add("ValueError")
    if first % tokens_per_block(engine, g):
        names.add("AlignmentError")
    if any(position % engine.model.groups[g].tokens_per_slot for position in tokens):
        names.add("AlignmentError")
    limit = per_group(engine.num_blocks, g)
    for block in blocks[g]:
        outside = block < 0 or (limit is not None and block >= limit)
        if outside and block != null_block_id(engine, g):
            names.add("BlockRangeError")
    return names


def _target_list_errors(
    target: Any, g: int, blocks: Sequence[Any], first_token: Any, due: np.ndarray
) -> set[str]:
    """Return what is wrong with the target blocks under the due tokens."""
    names = set()
    if None in block_ids_at(target, g, blocks, first_token, due):
        names.add("BlockRangeError")
    indices = set(((due - per_group(first_token, g)) // tokens_per_block(target, g)).tolist())
    due_ids = [int(block) for i, block in enumerate(blocks[g]) if i in indices]
    if len(set(due_ids)) != len(due_ids):
        names.add("OverlapError")
    return names


def chosen_source(source: Any, target: Any, target_rank: int, layer: int, head: int) -> int:
    """Return the source rank from which `target_rank` reads the elements of (layer, head)."""
    having = holders(source, group_of_layer(source, layer), layer, head)
    needing = holders(target, group_of_layer(target, layer), layer, head)
    return having[needing.index(target_rank) * len(having) // len(needing)]


def readers(source: Any, target: Any, source_rank: int) -> tuple[int, ...]:
    """Return the target ranks that need anything that `source_rank` holds, ascending."""
    require_supported(source)
    require_supported(target)
    result = set()
    for g in range(len(target.model.groups)):
        for layer in shared_layers(source, target, g):
            source_group = group_of_layer(source, layer)
            for head in head_range(source, source_group, source_rank):
                result.update(holders(target, g, layer, head))
    return tuple(sorted(result))


def expected_bytes(
    source: Any,
    target: Any,
    target_rank: int,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    *,
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> dict[int, int]:
    """Return the payload of `target_rank`'s pull plan, by the source rank that it comes from."""
    require_supported(source)
    require_supported(target)
    payload: dict[int, int] = {}
    for g, group in enumerate(target.model.groups):
        due = due_tokens(
            source, target, g, source_blocks, target_blocks, tokens,
            source_first_token, target_first_token,
        )  # fmt: skip
        entries = len(due) // group.tokens_per_slot
        num_bytes = entries * (row_bytes(group, "K") + row_bytes(group, "V"))
        for layer in shared_layers(source, target, g):
            for head in head_range(target, g, target_rank):
                if num_bytes:
                    rank = chosen_source(source, target, target_rank, layer, head)
                    payload[rank] = payload.get(rank, 0) + num_bytes
    return payload


def expected_pairs(
    source: Any,
    target: Any,
    target_rank: int,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    *,
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> tuple[set[tuple[int, int]], set[int]]:
    """Return the pull plan's (source rank, target rank) pairs, and its notify-only source ranks."""
    payload = expected_bytes(
        source, target, target_rank, source_blocks, target_blocks, tokens,
        source_first_token=source_first_token, target_first_token=target_first_token,
    )  # fmt: skip
    interested = set()
    for g in range(len(target.model.groups)):
        for layer in shared_layers(source, target, g):
            for head in head_range(target, g, target_rank):
                interested.update(holders(source, group_of_layer(source, layer), layer, head))
    return {(rank, target_rank) for rank in payload}, interested - set(payload)
