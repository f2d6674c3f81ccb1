"""Fill caches with a known pattern, and judge every byte that a copy of them left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .addresses import (
    cp_ranks,
    find_group,
    has_tokens,
    null_block_id,
    per_group,
    physical_blocks,
    places,
    row_bytes,
    split_rank,
    state_slot,
    tokens_per_block,
    tokens_per_slot,
    units_of_rank,
)
from .memory import CHUNK_BYTES, Region, address_of, bytes_of, like, regions, spans
from .mismatch import Mismatch, dim_at, locate, shown_unit
from .pattern import pattern_rows, poison_bytes
from .routing import moved_tokens, read_ranks
from .tensors import Slot, as_slot_bytes, plane_rows, slots

__all__ = ["check_reference", "fill_reference", "listed_places"]

# Ranks get the salts above this many requests' own.
MAX_REQUESTS = 1 << 16

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
    number: int


def fill_reference(
    engine: Any,
    rank: int,
    tensors: Sequence[np.ndarray],
    blocks: Sequence[Any],
    *,
    first_token: Any = 0,
    mark_rank: bool = False,
    request: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write the pattern of every token that a listed block covers into one rank's tensors.

    Of a state group, the pattern of the state is written into the slot that is listed.

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
    request
        A number that makes the pattern one request's own, below 65,536.
    progress
        Called with the bytes just written, every few hundred KiB.
    """
    salts = np.array([[_salt(request, rank if mark_rank else 0)]])
    for slot, tensor in zip(slots(engine, rank), as_slot_bytes(engine, rank, tensors), strict=True):
        tokens, blocks_of_tokens, entries = _listed(engine, slot.group, rank, blocks, first_token)
        for layer, plane in _layer_planes(slot):
            units = np.array(units_of_rank(engine, slot.group, plane, rank))
            num_bytes = row_bytes(engine.model.groups[slot.group], plane)
            rows = plane_rows(engine, slot, tensor, layer, plane)
            for part in _parts(len(tokens), len(units) * num_bytes):
                pattern = pattern_rows(layer, plane, tokens[part], units, salts, num_bytes)
                shape = (*pattern.shape[:2], *rows.shape[3:])
                rows[blocks_of_tokens[part], entries[part]] = pattern.reshape(shape)
                if progress is not None:
                    progress(pattern.size)


def _listed(
    engine: Any, g: int, rank: int, blocks: Sequence[Any], first_token: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens that live on `rank` under a list's blocks, one a slot, and their places."""
    if not has_tokens(engine.model.groups[g]):
        slot = state_slot(engine, g, blocks)
        found = np.array([] if slot is None else [slot], np.int64)
        return np.zeros_like(found), found, np.zeros_like(found)
    last_place = {int(block): i for i, block in enumerate(blocks[g])}
    null = null_block_id(engine, g)
    if null is not None:
        last_place.pop(null, None)
    per_block, per_slot = tokens_per_block(engine, g), tokens_per_slot(engine, g)
    starts = per_group(first_token, g) + per_block * np.array([*last_place.values()], np.int64)
    tokens = (starts[:, None] + np.arange(0, per_block, per_slot)).ravel()
    ids = np.repeat(np.array([*last_place], np.int64), per_block // per_slot)
    here = cp_ranks(engine, tokens) == split_rank(engine, rank)[2]
    return tokens[here], *places(engine, g, ids[here], tokens[here])


def _salt(request: Any, mark: Any) -> Any:
    """Return what makes the pattern one request's and one rank's."""
    return request + MAX_REQUESTS * mark


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
    request: int = 0,
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
    request
        The number with which the source was filled.
    progress
        Called with the bytes just judged; they add up to the bytes that the tensors span.

    Returns
    -------
    Mismatch or None
        The first wrong place, or `None` when all is well.
    """
    asked = _Request(
        source, target, target_rank, source_blocks, target_blocks, tokens,
        source_first_token, target_first_token, mark_rank, request,
    )  # fmt: skip
    as_bytes = as_slot_bytes(target, target_rank, tensors)
    for region in regions(tensors):
        was_due = np.zeros(region.flat.size, bool)
        for i, offset in zip(region.members, region.offsets, strict=True):
            marks = like(tensors[i], was_due, offset)
            mismatch = _judge_due(asked, i, as_bytes[i], marks)
            if mismatch is not None:
                return mismatch
        mismatch = _judge_rest(asked, region, as_bytes, was_due, before, progress)
        if mismatch is not None:
            return mismatch
    return None


def _judge_due(request: _Request, i: int, tensor: np.ndarray, marks: np.ndarray) -> Mismatch | None:
    """Compare what is due in tensor `i` with the pattern, and set its bytes in `marks`."""
    source, target, rank = request.source, request.target, request.target_rank
    slot = slots(target, rank)[i]
    g, group = slot.group, target.model.groups[slot.group]
    for layer, plane in _layer_planes(slot):
        due = moved_tokens(
            source, target, g, layer, rank, request.source_blocks, request.target_blocks,
            request.tokens, request.source_first_token, request.target_first_token,
        )  # fmt: skip
        if not len(due):
            continue
        blocks, entries = listed_places(
            target, g, request.target_blocks, request.target_first_token, due
        )
        origins = _origins(request, g, layer, due)
        units = np.array(units_of_rank(target, g, plane, rank))
        salts = np.full((len(due), len(units)), request.number)
        if request.mark_rank:
            salts = _salt(salts, read_ranks(source, target, rank, g, layer, plane, due))
        num_bytes = row_bytes(group, plane)
        rows = plane_rows(target, slot, tensor, layer, plane)
        row_marks = plane_rows(target, slot, marks, layer, plane)
        for part in _parts(len(due), len(units) * num_bytes):
            found = rows[blocks[part], entries[part]]
            flat = found.reshape(*found.shape[:2], num_bytes)
            expected = pattern_rows(layer, plane, origins[part], units, salts[part], num_bytes)
            if not np.array_equal(flat, expected):
                t, u, byte = np.argwhere(flat != expected)[0].tolist()
                block, entry = int(blocks[part][t]), int(entries[part][t])
                row = rows[block, entry, u]
                inner = np.unravel_index(byte, row.shape)
                left = row.shape[-1] - int(inner[-1])
                wrong = row[inner[:-1]][inner[-1] :]
                return Mismatch(
                    slot=i,
                    group=g,
                    layer=layer,
                    plane=plane,
                    block=block // physical_blocks(target, g),
                    token=int(due[part][t]) if has_tokens(group) else None,
                    head=shown_unit(group, plane, int(units[u])),
                    dim=dim_at(group, plane, byte),
                    offset_bytes=address_of(wrong) - address_of(tensor),
                    expected=expected[t, u, byte : byte + left].tobytes(),
                    found=flat[t, u, byte : byte + left].tobytes(),
                    due=True,
                )
            row_marks[blocks[part], entries[part]] = True
    return None


def listed_places(
    target: Any, g: int, blocks: Sequence[Any], first_token: Any, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensor blocks and `N` entries of tokens (or the state) under a side's list."""
    if not has_tokens(target.model.groups[g]):
        slot = state_slot(target, g, blocks)
        return np.full(len(tokens), slot), np.zeros(len(tokens), np.int64)
    ids = np.array([int(block) for block in blocks[g]], np.int64)
    indices = (tokens - per_group(first_token, g)) // tokens_per_block(target, g)
    return places(target, g, ids[indices], tokens)


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


def _origins(request: _Request, target_group: int, layer: int, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens whose pattern lies where the source says that `tokens` lie.

    They differ only under a block that is listed twice: it holds what its last place says.
    """
    like_group = request.target.model.groups[target_group]
    g = find_group(request.source, layer, like_group)
    assert g is not None, "due tokens have a source"
    if not has_tokens(like_group):
        return tokens
    per_block = tokens_per_block(request.source, g)
    ids = [int(block) for block in request.source_blocks[g]]
    last_place = {block: i for i, block in enumerate(ids)}
    moved = np.array([last_place[block] - i for i, block in enumerate(ids)], np.int64)
    indices = (tokens - per_group(request.source_first_token, g)) // per_block
    origins: np.ndarray = tokens + moved[indices] * per_block
    return origins


def _layer_planes(slot: Slot) -> Iterator[tuple[int, str]]:
    for layer in slot.layers:
        for plane in slot.planes:
            yield layer, plane


def _parts(num_tokens: int, token_bytes: int) -> Iterator[slice]:
    """Cut a list of tokens so that one part's rows are of a size that is quick to handle."""
    step = max(1, CHUNK_BYTES // token_bytes)
    for begin in range(0, num_tokens, step):
        yield slice(begin, begin + step)
