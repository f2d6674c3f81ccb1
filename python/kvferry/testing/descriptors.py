"""Descriptors run as plain byte moves, with every promise about them asserted on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .memory import extent

__all__ = ["apply_descriptors", "apply_staged_descriptors"]

COLUMNS = ("source_tensor", "source_offset", "target_tensor", "target_offset", "length")
STAGED_COLUMNS = ("source_tensor", "source_offset", "scratch_offset", "length")


def apply_descriptors(
    rows: Any, source_tensors: Sequence[np.ndarray], target_tensors: Sequence[np.ndarray]
) -> None:
    """Move the bytes that `rows` names between two ranks' tensors.

    Asserted: the columns are int64 of one length; every run lies inside its two tensors; rows are
    sorted by target, name no target byte twice, and no two of them could be one. As nothing
    overlaps, only neighbours in that order can.
    """
    sources = [extent(tensor) for tensor in source_tensors]
    targets = [extent(tensor) for tensor in target_tensors]
    previous = None
    for row in _rows(rows, COLUMNS):
        source, source_offset, target, target_offset, length = row
        assert length > 0, f"{row} is empty"
        assert 0 <= source < len(sources), f"{row} reads a tensor outside [0, {len(sources)})"
        assert 0 <= target < len(targets), f"{row} writes a tensor outside [0, {len(targets)})"
        room = sources[source].size - length
        assert 0 <= source_offset <= room, f"{row} reads outside its tensor"
        room = targets[target].size - length
        assert 0 <= target_offset <= room, f"{row} writes outside its tensor"
        if previous is not None:
            _assert_follows(previous, row)
        run = sources[source][source_offset : source_offset + length]
        targets[target][target_offset : target_offset + length] = run
        previous = row


def apply_staged_descriptors(
    rows: Any, source_tensors: Sequence[np.ndarray], scratch: np.ndarray
) -> None:
    """Move the bytes that `rows` names from one rank's tensors into `uint8` scratch memory.

    Asserted: the columns are int64 of one length; every run lies inside its tensor and the scratch;
    no scratch byte is named twice.
    """
    sources = [extent(tensor) for tensor in source_tensors]
    named = np.zeros(scratch.size, bool)
    for row in _rows(rows, STAGED_COLUMNS):
        source, source_offset, scratch_offset, length = row
        assert length > 0, f"{row} is empty"
        assert 0 <= source < len(sources), f"{row} reads a tensor outside [0, {len(sources)})"
        assert 0 <= source_offset <= sources[source].size - length, (
            f"{row} reads outside its tensor"
        )
        assert 0 <= scratch_offset <= scratch.size - length, f"{row} writes outside the scratch"
        to = slice(scratch_offset, scratch_offset + length)
        assert not named[to].any(), f"{row} writes a byte of scratch again"
        named[to] = True
        scratch[to] = sources[source][source_offset : source_offset + length]


def _rows(columns: Any, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield rows as tuples, once the columns are int64 of one length."""
    arrays = [np.asarray(getattr(columns, name)) for name in names]
    for name, array in zip(names, arrays, strict=True):
        assert array.dtype == np.int64, f"column {name} is {array.dtype}, not int64"
        assert array.shape == (len(arrays[0]),), f"column {name} has shape {array.shape}"
    yield from zip(*(array.tolist() for array in arrays), strict=True)


def _assert_follows(previous: tuple[int, ...], row: tuple[int, ...]) -> None:
    """Assert that `row` may come right after `previous`."""
    assert previous[2:4] < row[2:4], f"{previous} and {row} are not sorted by target"
    if previous[2] != row[2]:
        return
    target_end = previous[3] + previous[4]
    assert target_end <= row[3], f"{previous} and {row} write the same byte"
    adjacent = previous[0] == row[0] and previous[1] + previous[4] == row[1]
    assert not (adjacent and target_end == row[3]), f"{previous} and {row} could be one"
