"""Bytes that give themselves away: a pattern named after its element, and a poison after its place.

The pattern of a row (one unit of one plane: of one token, or of a state) is a hash of (layer,
plane, token, unit, salt), so that a row in a wrong place, or shifted by a byte, does not pass for
another. The poison is a hash of a byte's place in memory. Both are a few `uint32` operations for
four bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from .memory import regions, spans

__all__ = ["pattern_rows", "poison", "poison_bytes"]

# Odd multipliers with well-spread bits, from the finalisers of the xxHash and lowbias32 functions.
GOLDEN = np.uint32(0x9E3779B1)
WORD_STEP = np.uint32(0x85EBCA77)
WORD_MIX = np.uint32(0xC2B2AE3D)
POISON_STEP = np.uint32(0x27D4EB2F)
POISON_MIX = np.uint32(0x165667B1)
FIRST_MIX = np.uint32(0x7FEB352D)
SECOND_MIX = np.uint32(0x846CA68B)


def pattern_rows(
    layer: int, plane: str, tokens: np.ndarray, units: np.ndarray, salts: np.ndarray, num_bytes: int
) -> np.ndarray:
    """Return the pattern of a plane's rows as `uint8` [tokens, units, num_bytes].

    `salts` is broadcast to [tokens, units].
    """
    row = _hash(layer, zlib.crc32(plane.encode()), units[None, :], salts, tokens[:, None])
    steps = np.arange(-(-num_bytes // 4), dtype=np.uint32) * WORD_STEP
    words: np.ndarray = row[:, :, None] ^ steps
    words *= WORD_MIX
    words ^= words >> np.uint32(16)
    return words.view(np.uint8)[:, :, :num_bytes]


def poison_bytes(region: int, begin: int, end: int) -> np.ndarray:
    """Return the poison of a region's bytes `[begin, end)`."""
    words = np.arange(begin // 4, -(-end // 4), dtype=np.uint32) * POISON_STEP
    words ^= _hash(region)[0]
    words ^= words >> np.uint32(15)
    words *= POISON_MIX
    words ^= words >> np.uint32(16)
    return words.view(np.uint8)[begin % 4 : begin % 4 + end - begin]


def poison(tensors: Sequence[np.ndarray]) -> None:
    """Overwrite tensors, and the padding that they span, with bytes that depend on the place."""
    for region in regions(tensors):
        for begin, end in spans(region.flat.size):
            region.flat[begin:end] = poison_bytes(region.index, begin, end)


def _hash(*coordinates: int | np.ndarray) -> np.ndarray:
    """Hash coordinates, broadcast against each other, to well-mixed 32-bit words."""
    value = np.zeros(1, dtype=np.uint32)
    for coordinate in coordinates:
        value = value * GOLDEN + np.asarray(coordinate).astype(np.uint32) + GOLDEN
        value ^= value >> np.uint32(16)
        value *= FIRST_MIX
        value ^= value >> np.uint32(15)
        value *= SECOND_MIX
        value ^= value >> np.uint32(16)
    return value
