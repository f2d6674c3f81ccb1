"""Fill caches with a known pattern, and judge every byte that a copy of them left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .addresses import (
    Slot,
    axes_of,
    block_ids_at,
    group_of_layer,
    head_range,
    null_block_id,
    per_group,
    plane_rows,
    slots,
    tensor_shape,
    tokens_per_block,
)
from .memory import CHUNK_BYTES, Region, address_of, bytes_of, like, regions, spans
from .mismatch import Mismatch, dim_at, locate
from .pattern import pattern_rows, poison_bytes
from .routing import chosen_source, due_tokens, shared_layers

__all__ = ["check_reference", "fill_reference"]

Progress = Callable[[int], None]


@dataclass(frozen=True)
class _Request:
    """The arguments of `check_reference` that say what should have been copied."""

    source: Any
    target: Any
    target_rank: int
    source_blocks: Sequence[Any]
    target_blocks: Sequence[Any]
    tokens: tuple[int, int]
    source_first_token: Any
    target_first_token: Any
    mark_rank: bool


def fill_reference(
    engine: Any,
    rank: int,
    tensors: Sequence[np.ndarray],
    blocks: Sequence[Any],
    *,
    first_token: Any = 0,
    mark_rank: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the pattern of every token that a listed block covers into one rank's tensors.

    Parameters
    ----------
    engine
        Anything with the attributes of an `EngineSpec`.
    rank
        The rank whose tensors these are.
    tensors
        One array a tensor slot, in registration order; dimensions in the layout's memory order,
        of any item size that makes up the same rows.
    blocks
        Block ids a group; element `i` covers tokens `[first_token + i * tokens_per_block, …)`.
        Null blocks are skipped; where an id is listed twice, its last place counts.
    first_token
        One position, or one a group.
    mark_rank
        Make the pattern this rank's own, so that a copy shows from which rank it was read.
    progress
        Called with the bytes just written, every few hundred KiB.
    """
    salt = rank if mark_rank else 0
    for slot, tensor in zip(slots(engine, rank), _as_bytes(engine, rank, tensors), strict=True):
        g = slot.group
        last_place = {int(block): i for i, block in enumerate(blocks[g])}
        null = null_block_id(engine, g)
        if null is not None:
            last_place.pop(null, None)
        per_block = tokens_per_block(engine, g)
        per_slot = engine.model.groups[g].tokens_per_slot
        starts = per_group(first_token, g) + per_block * np.array([*last_place.values()], np.int64)
        tokens = (starts[:, None] + np.arange(0, per_block, per_slot)).ravel()
        ids = np.repeat(np.array([*last_place], np.int64), per_block // per_slot)
        entries = np.tile(np.arange(per_block // per_slot), len(last_place))
        heads = np.array(head_range(engine, g, rank))
        for layer, plane in _layer_planes(slot):
            rows = plane_rows(engine, slot, tensor, layer, plane)
            for part in _parts(len(tokens), rows):
                pattern = pattern_rows(
                    layer, plane, tokens[part], heads, np.full(len(heads), salt), rows.shape[-1]
                )
                rows[ids[part], entries[part]] = pattern
                if progress is not None:
                    progress(pattern.size)


def check_reference(
    source: Any,
    target: Any,
    target_rank: int,
    tensors: Sequence[np.ndarray],
    before: Sequence[np.ndarray] | None,
    source_blocks: Sequence[Any],
    target_blocks: Sequence[Any],
    tokens: tuple[int, int],
    *,
    source_first_token: Any = 0,
    target_first_token: Any = 0,
    mark_rank: bool = False,
    progress: Progress | None = None,
) -> Mismatch | None:
    """Judge every byte of one target rank's tensors after a copy of a valid request.

    What is due must hold the pattern that `fill_reference` left in the source; every other byte,
    padding included, must be as before.

    Parameters
    ----------
    source, target
        Anything with the attributes of an `EngineSpec`.
    target_rank
        The rank whose tensors these are.
    tensors
        One array a tensor slot, as for `fill_reference`.
    before
        What the tensors held before the copy: the result of `snapshot`, or dense copies, with
        which padding is not compared. `None`: what `poison` had put there.
    source_blocks, target_blocks, tokens, source_first_token, target_first_token
        The request, as for `Route.plan`.
    mark_rank
        Whether the source ranks were filled with `mark_rank`: then each element must come from
        the one source rank that the contract names.
    progress
        Called with the bytes just judged; they add up to the bytes that the tensors span.

    Returns
    -------
    Mismatch or None
        The first wrong place, or `None` when all is well.
    """
    request = _Request(
        source, target, target_rank, source_blocks, target_blocks, tokens,
        source_first_token, target_first_token, mark_rank,
    )  # fmt: skip
    as_bytes = _as_bytes(target, target_rank, tensors)
    for region in regions(tensors):
        was_due = np.zeros(region.flat.size, bool)
        for i, offset in zip(region.members, region.offsets, strict=True):
            marks = like(tensors[i], was_due, offset)
            mismatch = _judge_due(request, i, as_bytes[i], marks)
            if mismatch is not None:
                return mismatch
        mismatch = _judge_rest(request, region, as_bytes, was_due, before, progress)
        if mismatch is not None:
            return mismatch
    return None


def _judge_due(request: _Request, i: int, tensor: np.ndarray, marks: np.ndarray) -> Mismatch | None:
    """Compare what is due in tensor `i` with the pattern, and set its bytes in `marks`."""
    source, target, rank = request.source, request.target, request.target_rank
    slot = slots(target, rank)[i]
    g = slot.group
    due = due_tokens(
        source, target, g, request.source_blocks, request.target_blocks, request.tokens,
        request.source_first_token, request.target_first_token,
    )  # fmt: skip
    per_slot = target.model.groups[g].tokens_per_slot
    due = due[due % per_slot == 0]
    ids = block_ids_at(target, g, request.target_blocks, request.target_first_token, due)
    blocks = np.array(ids, np.int64)
    inside = (due - per_group(request.target_first_token, g)) % tokens_per_block(target, g)
    entries = inside // per_slot
    heads = np.array(head_range(target, g, rank))
    for layer, plane in _layer_planes(slot):
        if layer not in shared_layers(source, target, g):
            continue
        origins = _origins(request, layer, due)
        salts = np.zeros(len(heads), np.int64)
        if request.mark_rank:
            salts += [chosen_source(source, target, rank, layer, head) for head in heads.tolist()]
        rows = plane_rows(target, slot, tensor, layer, plane)
        row_marks = plane_rows(target, slot, marks, layer, plane)
        for part in _parts(len(due), rows):
            found = rows[blocks[part], entries[part]]
            expected = pattern_rows(layer, plane, origins[part], heads, salts, rows.shape[-1])
            if not np.array_equal(found, expected):
                t, h, byte = np.argwhere(found != expected)[0].tolist()
                block, entry = int(blocks[part][t]), int(entries[part][t])
                return Mismatch(
                    slot=i,
                    group=g,
                    layer=layer,
                    plane=plane,
                    block=block,
                    token=int(due[part][t]),
                    head=int(heads[h]),
                    dim=dim_at(target.model.groups[g], byte),
                    offset_bytes=address_of(rows[block, entry, h, byte:]) - address_of(tensor),
                    expected=expected[t, h, byte:].tobytes(),
                    found=found[t, h, byte:].tobytes(),
                )
            row_marks[blocks[part], entries[part]] = True
    return None


def _judge_rest(
    request: _Request,
    region: Region,
    tensors: Sequence[np.ndarray],
    was_due: np.ndarray,
    before: Sequence[np.ndarray] | None,
    progress: Progress | None,
) -> Mismatch | None:
    """Compare every byte of a region that was not due with what it held before."""
    old = None if before is None else _flat_before(region, tensors, before)
    for begin, end in spans(region.flat.size):
        now = region.flat[begin:end]
        then = poison_bytes(region.index, begin, end) if old is None else old[begin:end]
        changed = (now != then) & ~was_due[begin:end]
        if changed.any():
            byte = int(np.argmax(changed))
            return locate(
                request.target, request.target_rank, region, tensors, begin + byte,
                then[byte:], now[byte:],
            )  # fmt: skip
        if progress is not None:
            progress(end - begin)
    return None


def _flat_before(
    region: Region, tensors: Sequence[np.ndarray], before: Sequence[np.ndarray]
) -> np.ndarray:
    """Return what a region held, in the region's own geometry."""
    copies = [bytes_of(before[i]) for i in region.members]
    joined = regions(copies)
    same_strides = all(
        copy.strides == tensors[i].strides for i, copy in zip(region.members, copies, strict=True)
    )
    if len(joined) == 1 and joined[0].offsets == region.offsets and same_strides:
        return joined[0].flat
    flat = region.flat.copy()
    for i, offset, copy in zip(region.members, region.offsets, copies, strict=True):
        like(tensors[i], flat, offset)[...] = copy
    return flat


def _origins(request: _Request, layer: int, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens whose pattern lies where the source says that `tokens` lie.

    They differ only under a block that is listed twice: it holds what its last place says.
    """
    g = group_of_layer(request.source, layer)
    per_block = tokens_per_block(request.source, g)
    ids = [int(block) for block in request.source_blocks[g]]
    last_place = {block: i for i, block in enumerate(ids)}
    moved = np.array([last_place[block] - i for i, block in enumerate(ids)], np.int64)
    indices = (tokens - per_group(request.source_first_token, g)) // per_block
    origins: np.ndarray = tokens + moved[indices] * per_block
    return origins


def _as_bytes(engine: Any, rank: int, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the tensors as `uint8`, once their number and shapes are those of the rank's slots."""
    rank_slots = slots(engine, rank)
    if len(tensors) != len(rank_slots):
        raise ValueError(f"{len(tensors)} tensors for the {len(rank_slots)} slots of rank {rank}")
    result = [bytes_of(tensor) for tensor in tensors]
    for i, (slot, tensor) in enumerate(zip(rank_slots, result, strict=True)):
        axes = axes_of(engine, slot.group)
        num_blocks = tensor.shape[axes.index("B")] if tensor.ndim == len(axes) else 0
        shape = tensor_shape(engine, rank, slot, num_blocks)
        if tensor.shape != shape:
            raise ValueError(f"tensor {i} ({axes}) has byte shape {tensor.shape}, not {shape}")
        if tensors[i].shape[-1] > 1 and tensors[i].strides[-1] != tensors[i].itemsize:
            raise ValueError(f"tensor {i} ({axes}) is not contiguous along {axes[-1]}")
    return result


def _layer_planes(slot: Slot) -> Iterator[tuple[int, str]]:
    for layer in slot.layers:
        for plane in slot.planes:
            yield layer, plane


def _parts(num_tokens: int, rows: np.ndarray) -> Iterator[slice]:
    """Cut a list of tokens so that one part's rows are of a size that is quick to handle."""
    step = max(1, CHUNK_BYTES // (rows.shape[-2] * rows.shape[-1]))
    for begin in range(0, num_tokens, step):
        yield slice(begin, begin + step)
