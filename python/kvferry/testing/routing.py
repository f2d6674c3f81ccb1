"""Which tokens are due, who moves them, and which requests must be refused.

This module owns the contract's section on plans, as far as it can be told without tensors. The
arguments are those of `Route.plan`: block ids a group, matched by token position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .addresses import (
    block_ids_at,
    cp_ranks,
    find_group,
    has_tokens,
    held_planes,
    holders,
    null_block_id,
    per_group,
    rank_of,
    ranks,
    row_bytes,
    split_rank,
    stage_of_layer,
    state_slot,
    tokens_per_block,
    tokens_per_slot,
    units_of_rank,
    units_per_tp_rank,
)

__all__ = [
    "chosen_source",
    "due_tokens",
    "expected_bytes",
    "expected_error",
    "expected_pairs",
    "expected_push_bytes",
    "moved_tokens",
    "read_ranks",
    "readers",
    "shared_layers",
    "source_groups",
]


def shared_layers(source: Any, target: Any, g: int) -> list[int]:
    """Return the layers of the target's group `g` that the source caches too, ascending."""
    group = target.model.groups[g]
    return [x for x in sorted(group.layers) if find_group(source, x, group) is not None]


def source_groups(source: Any, target: Any, g: int) -> list[int]:
    """Return the source's groups that hold a layer of the target's group `g`."""
    group = target.model.groups[g]
    found = {find_group(source, layer, group) for layer in group.layers}
    return sorted(h for h in found if h is not None)


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
    the target's list is checked, but nothing moves. A state group has no tokens.
    """
    begin, end = tokens
    group = target.model.groups[g]
    if not has_tokens(group):
        return np.arange(0)
    window = getattr(group, "sliding_window", -1)
    due: np.ndarray = np.arange(begin, end)
    due = due[due >= per_group(target_first_token, g)]
    if window > 0:
        due = due[due >= end - window]
    null = null_block_id(target, g)
    if null is not None:
        ids = block_ids_at(target, g, target_blocks, target_first_token, due)
        due = due[np.array([block != null for block in ids], bool)]
    return due


def moved_tokens(
    source: Any,
    target: Any,
    g: int,
    layer: int,
    target_rank: int,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> np.ndarray:
    """Return the first tokens of the slots of a layer of group `g` that move to `target_rank`.

    Of a state that moves, this is the one token 0.
    """
    source_group = find_group(source, layer, target.model.groups[g])
    if source_group is None:
        return np.arange(0)
    if not has_tokens(target.model.groups[g]):
        ends = state_slot(source, source_group, source_blocks), state_slot(target, g, target_blocks)
        return np.arange(0 if None in ends else 1)
    due = due_tokens(
        source, target, g, source_blocks, target_blocks, tokens,
        source_first_token, target_first_token,
    )  # fmt: skip
    due = due[due % tokens_per_slot(target, g) == 0]
    here: np.ndarray = due[cp_ranks(target, due) == split_rank(target, target_rank)[2]]
    return here


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
    for g, group in enumerate(target.model.groups):
        if not has_tokens(group):
            continue
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
    if has_tokens(engine.model.groups[g]):
        if first % tokens_per_block(engine, g):
            names.add("AlignmentError")
        if any(position % tokens_per_slot(engine, g) for position in tokens):
            names.add("AlignmentError")
    elif len(blocks[g]) > 1:
        names.add("BlockRangeError")
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


def chosen_source(
    source: Any,
    target: Any,
    target_rank: int,
    g: int,
    layer: int,
    plane: str,
    unit: int,
    token: int = 0,
) -> int:
    """Return the source rank from which `target_rank` reads an element of the target's group `g`.

    Of `R` ranks that hold it, the `j`-th of `n` that need it reads from the `j*R//n`-th.
    """
    source_group = find_group(source, layer, target.model.groups[g])
    assert source_group is not None, f"the source does not cache layer {layer}"
    having = holders(source, source_group, layer, plane, unit, token)
    needing = holders(target, g, layer, plane, unit, token)
    return having[needing.index(target_rank) * len(having) // len(needing)]


def read_ranks(
    source: Any,
    target: Any,
    target_rank: int,
    g: int,
    layer: int,
    plane: str,
    tokens: np.ndarray,
) -> np.ndarray:
    """Return the source rank of each element that `target_rank` holds of a plane: [tokens, units].

    Where a token lives matters only through its CP rank at the source, so one token of each will
    do.
    """
    units = units_of_rank(target, g, plane, target_rank)
    result = np.zeros((len(tokens), len(units)), np.int64)
    having = cp_ranks(source, tokens)
    for cp in np.unique(having).tolist():
        token = int(tokens[having == cp][0])
        result[having == cp] = [
            chosen_source(source, target, target_rank, g, layer, plane, unit, token)
            for unit in units
        ]
    return result


def readers(source: Any, target: Any, source_rank: int) -> tuple[int, ...]:
    """Return the target ranks that need anything that `source_rank` holds, ascending."""
    met = {
        other for cp, other in _meeting_cp_ranks(source, target) if cp == _cp(source, source_rank)
    }
    found: set[int] = set()
    for h in range(len(source.model.groups)):
        for layer, plane in held_planes(source, h, source_rank):
            g = find_group(target, layer, source.model.groups[h])
            if g is not None:
                found |= _holding(source, h, source_rank, target, g, layer, plane, met)
    return tuple(sorted(found))


def _sources_of_interest(source: Any, target: Any, target_rank: int) -> set[int]:
    """Return the source ranks that have `target_rank` among their readers."""
    met = {
        cp for cp, other in _meeting_cp_ranks(source, target) if other == _cp(target, target_rank)
    }
    found: set[int] = set()
    for g in range(len(target.model.groups)):
        for layer, plane in held_planes(target, g, target_rank):
            h = find_group(source, layer, target.model.groups[g])
            if h is not None:
                found |= _holding(target, g, target_rank, source, h, layer, plane, met)
    return found


def _holding(
    engine: Any,
    g: int,
    rank: int,
    other: Any,
    h: int,
    layer: int,
    plane: str,
    met: set[int],
) -> set[int]:
    """Return the ranks of `other` that hold an element of a plane which `rank` holds too.

    `met` has the CP ranks of `other` that share a token position with `rank`.
    """
    units = units_of_rank(engine, g, plane, rank)
    pp = stage_of_layer(other, layer)
    cps = met if has_tokens(engine.model.groups[g]) else range(other.cp_size)
    return {
        rank_of(other, pp, tp, cp)
        for tp, held in enumerate(units_per_tp_rank(other, h, plane))
        if set(units).intersection(held)
        for cp in cps
    }


def _cp(engine: Any, rank: int) -> int:
    return split_rank(engine, rank)[2]


def _meeting_cp_ranks(source: Any, target: Any) -> set[tuple[int, int]]:
    """Return the (source, target) CP ranks that hold a token position in common."""
    periods = (engine.cp_size * engine.cp_interleave for engine in (source, target))
    tokens = np.arange(math.lcm(*periods))
    ends = (cp_ranks(engine, tokens).tolist() for engine in (source, target))
    return set(zip(*ends, strict=True))


def _payload(
    source: Any, target: Any, target_rank: int, request: tuple[Any, ...]
) -> Iterator[tuple[int, int]]:
    """Yield (source rank, bytes) of what `target_rank` reads, in many small amounts."""
    for g, group in enumerate(target.model.groups):
        for layer, plane in held_planes(target, g, target_rank):
            tokens = moved_tokens(source, target, g, layer, target_rank, *request)
            chosen = read_ranks(source, target, target_rank, g, layer, plane, tokens)
            for rank, count in zip(*np.unique(chosen, return_counts=True), strict=True):
                yield int(rank), int(count) * row_bytes(group, plane)


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
    request = (source_blocks, target_blocks, tokens, source_first_token, target_first_token)
    payload: dict[int, int] = {}
    for rank, num_bytes in _payload(source, target, target_rank, request):
        payload[rank] = payload.get(rank, 0) + num_bytes
    return payload


def expected_push_bytes(
    source: Any,
    target: Any,
    source_rank: int,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    *,
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> dict[int, int]:
    """Return the payload of `source_rank`'s push plan, by the target rank that it goes to.

    It is what the pull plans of all targets read from this source.
    """
    payload: dict[int, int] = {}
    for target_rank in ranks(target):
        pulled = expected_bytes(
            source, target, target_rank, source_blocks, target_blocks, tokens,
            source_first_token=source_first_token, target_first_token=target_first_token,
        )  # fmt: skip
        if source_rank in pulled:
            payload[target_rank] = pulled[source_rank]
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
    notify_only = _sources_of_interest(source, target, target_rank) - set(payload)
    return {(rank, target_rank) for rank in payload}, notify_only
