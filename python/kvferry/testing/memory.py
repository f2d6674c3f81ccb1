"""Arrays as plain memory: bytes, extents, and stretches that several tensors share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

__all__ = ["Region", "address_of", "bytes_of", "extent", "like", "regions", "snapshot", "spans"]

# Bytes handled at a time: temporaries of this size stay in a core's cache.
CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class Region:
    """A stretch of memory that one tensor spans, or several whose stretches overlap."""

    index: int
    flat: np.ndarray  # uint8, from the lowest first byte to the highest last byte
    members: tuple[int, ...]  # indices into the list of tensors
    offsets: tuple[int, ...]  # each member's first byte, from the region's start


def address_of(tensor: np.ndarray) -> int:
    """Return the address of the first byte."""
    return int(tensor.__array_interface__["data"][0])


def bytes_of(tensor: np.ndarray) -> np.ndarray:
    """Return `tensor` as `uint8`, its innermost axis in bytes; nothing is copied."""
    if tensor.dtype == np.uint8:
        return tensor
    first = as_strided(tensor, shape=(1,), strides=(tensor.itemsize,)).view(np.uint8)
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)
    return as_strided(first, shape=shape, strides=(*tensor.strides[:-1], 1))


def extent(tensor: np.ndarray) -> np.ndarray:
    """Return all bytes from a tensor's first to its last, padding included, as flat `uint8`."""
    as_bytes = bytes_of(tensor)
    pairs = zip(as_bytes.shape, as_bytes.strides, strict=True)
    size = 1 + sum((count - 1) * stride for count, stride in pairs)
    return as_strided(as_bytes, shape=(size,), strides=(1,))


def like(tensor: np.ndarray, flat: np.ndarray, offset: int) -> np.ndarray:
    """Return a view of `flat` (one-byte items) with the byte geometry of `tensor`, at `offset`."""
    as_bytes = bytes_of(tensor)
    return as_strided(flat[offset:], shape=as_bytes.shape, strides=as_bytes.strides)


def regions(tensors: Sequence[np.ndarray]) -> list[Region]:
    """Group tensors whose extents overlap, in order of their first members."""
    extents = [extent(tensor) for tensor in tensors]
    begins = [address_of(flat) for flat in extents]
    joined: list[tuple[int, int, list[int]]] = []
    for i in sorted(range(len(tensors)), key=lambda i: begins[i]):
        end = begins[i] + extents[i].size
        if joined and begins[i] < joined[-1][1]:
            begin, last, members = joined[-1]
            joined[-1] = (begin, max(last, end), [*members, i])
        else:
            joined.append((begins[i], end, [i]))
    result: list[Region] = []
    for begin, end, members in sorted(joined, key=lambda entry: min(entry[2])):
        flat = as_strided(extents[members[0]], shape=(end - begin,), strides=(1,))
        members.sort()
        offsets = tuple(begins[i] - begin for i in members)
        result.append(Region(len(result), flat, tuple(members), offsets))
    return result


def snapshot(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copy tensors as bytes, with their strides, interleaving, and the padding that they span."""
    copies: dict[int, np.ndarray] = {}
    for region in regions(tensors):
        flat = region.flat.copy()
        for i, offset in zip(region.members, region.offsets, strict=True):
            copies[i] = like(tensors[i], flat, offset)
    return [copies[i] for i in range(len(tensors))]


def spans(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut `[0, num_bytes)` into ranges of a size that is quick to handle."""
    for begin in range(0, num_bytes, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, num_bytes)
