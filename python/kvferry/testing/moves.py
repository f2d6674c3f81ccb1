"""Byte moves as rows: what must move, one row a run, and how few rows could say it.

A row is (source tensor, source offset, target tensor, target offset, length), int64 [rows, 5], as
in a plan's descriptors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .addresses import find_group, held_planes, units_of_rank
from .memory import address_of
from .reference import listed_places
from .routing import moved_tokens, read_ranks
from .tensors import as_slot_bytes, plane_rows, slots

__all__ = ["coalesce", "expand_loops", "expected_moves", "greedy_count"]


def expected_moves(
    source: Any,
    target: Any,
    source_rank: int,
    target_rank: int,
    source_tensors: Sequence[np.ndarray],
    target_tensors: Sequence[np.ndarray],
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    *,
    source_first_token: Any = 0,
    target_first_token: Any = 0,
) -> np.ndarray:
    """Return the runs that a rank pair moves, one row a unit of a plane of one token.

    The unit of a state part has several, one for every stretch that lies together in memory. Rows
    come in the order of layers, planes, tokens, units.
    """
    sources = as_slot_bytes(source, source_rank, source_tensors)
    targets = as_slot_bytes(target, target_rank, target_tensors)
    found = [np.zeros((0, 5), np.int64)]
    for g, group in enumerate(target.model.groups):
        for layer, plane in held_planes(target, g, target_rank):
            due = moved_tokens(
                source, target, g, layer, target_rank, source_blocks, target_blocks, tokens,
                source_first_token, target_first_token,
            )  # fmt: skip
            chosen = read_ranks(source, target, target_rank, g, layer, plane, due)
            t, u = np.nonzero(chosen == source_rank)
            if not len(t):
                continue
            h = find_group(source, layer, group)
            assert h is not None, "tokens are due only where the source has the layer"
            units = np.array(units_of_rank(target, g, plane, target_rank))[u]
            local = units - units_of_rank(source, h, plane, source_rank).start
            read = listed_places(source, h, source_blocks, source_first_token, due[t])
            written = listed_places(target, g, target_blocks, target_first_token, due[t])
            ends = [
                _offsets(source, source_rank, sources, h, layer, plane, *read, local),
                _offsets(target, target_rank, targets, g, layer, plane, *written, u),
            ]
            (source_tensor, source_offset, length), (target_tensor, target_offset, _) = ends
            rows = np.empty((source_offset.size, 5), np.int64)
            rows[:, 0], rows[:, 2], rows[:, 4] = source_tensor, target_tensor, length
            rows[:, 1], rows[:, 3] = source_offset.ravel(), target_offset.ravel()
            found.append(rows)
    return np.concatenate(found)


def _offsets(
    engine: Any,
    rank: int,
    tensors: Sequence[np.ndarray],
    g: int,
    layer: int,
    plane: str,
    blocks: np.ndarray,
    entries: np.ndarray,
    units: np.ndarray,
) -> tuple[int, np.ndarray, int]:
    """Return the tensor, the offsets [elements, stretches of a row], and a stretch's bytes."""
    for i, slot in enumerate(slots(engine, rank)):
        if slot.group == g and layer in slot.layers and plane in slot.planes:
            rows = plane_rows(engine, slot, tensors[i], layer, plane)
            per_block, per_entry, per_unit, *inner = rows.strides
            offsets = blocks * per_block + entries * per_entry + units * per_unit
            offsets = offsets[:, None] + (address_of(rows) - address_of(tensors[i]))
            for size, stride in zip(rows.shape[3:-1], inner[:-1], strict=True):
                steps = np.arange(size) * stride
                offsets = (offsets[:, :, None] + steps).reshape(len(offsets), -1)
            return i, offsets, rows.shape[-1]
    raise AssertionError(f"rank {rank} holds no layer {layer}, plane {plane} of group {g}")


def expand_loops(loops: Any) -> np.ndarray:
    """Return the runs for which the rows of `Plan.loops` stand, in their order.

    Row `r` stands for a run at `offset + table[e] + i·strides`, for every entry `e` of its slice of
    the table, and every index `i` below `counts`.
    """
    runs = []
    for r in range(len(loops)):
        indices = list(itertools.product(*(range(count) for count in loops.counts[r].tolist())))
        by_index = np.array(indices, np.int64)
        entries = slice(int(loops.table_begin[r]), int(loops.table_end[r]))
        offsets = [
            (offset[r] + table[entries][:, None] + by_index @ strides[r]).ravel()
            for offset, table, strides in (
                (loops.source_offset, loops.source_table, loops.source_strides),
                (loops.target_offset, loops.target_table, loops.target_strides),
            )
        ]
        rows = np.empty((len(offsets[0]), 5), np.int64)
        rows[:, 0], rows[:, 2] = loops.source_tensor[r], loops.target_tensor[r]
        rows[:, 1], rows[:, 3] = offsets
        rows[:, 4] = loops.run_bytes[r]
        runs.append(rows)
    return np.concatenate([np.zeros((0, 5), np.int64), *runs])


def coalesce(rows: np.ndarray) -> np.ndarray:
    """Return the same byte moves in as few rows as can be, sorted by target.

    No two rows write the same byte, so only neighbours in the order of target bytes can be one.
    """
    return _merge(rows[np.lexsort((rows[:, 3], rows[:, 2]))])


def greedy_count(rows: np.ndarray) -> int:
    """Return how many rows a coalescer makes that merges neighbours as it meets them.

    It meets them in the order given, or in the order of target bytes, whichever makes fewer.
    """
    return min(len(_merge(rows)), len(coalesce(rows)))


def _merge(rows: np.ndarray) -> np.ndarray:
    """Merge every row into the one before it where it goes on there, on both sides."""
    if not len(rows):
        return rows
    before, after = rows[:-1], rows[1:]
    goes_on = (before[:, [0, 2]] == after[:, [0, 2]]).all(axis=1)
    for column in (1, 3):
        goes_on &= before[:, column] + before[:, 4] == after[:, column]
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    merged = rows[begins].copy()
    merged[:, 4] = np.add.reduceat(rows[:, 4], begins)
    return merged
