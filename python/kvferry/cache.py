"""Registered tensors: `KVCache` in this process, `RankDescription` on its way to a peer."""

from __future__ import annotations

import msgspec

from kvferry._core import KVCache

__all__ = ["KVCache", "RankDescription", "SlotDescription"]


class SlotDescription(msgspec.Struct, frozen=True):
    """One registered tensor as its owner's memory has it.

    Parameters
    ----------
    name
        Name of the tensor slot.
    address
        First byte, in the owner's address space.
    sizes
        Items along each axis of the layout, outermost first.
    strides
        Bytes from one item to the next along each axis; 0 where the size is 1.
    item_bytes
        Bytes of one item.
    device
        DLPack device type and index; ``(1, 0)`` is host memory.
    writable
        Whether it may be a target. numpy tells when memory is read-only; torch does not, not even
        of a tensor that `torch.from_numpy` made of a read-only array.
    """

    name: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    device: tuple[int, int]
    writable: bool


class RankDescription(msgspec.Struct, frozen=True):
    """What a peer must know of one rank's tensors; made by `KVCache.describe`.

    Parameters
    ----------
    engine_id
        The engine whose rank it is.
    rank
        Global rank.
    slots
        One entry a tensor, in slot order.
    """

    engine_id: str
    rank: int
    slots: tuple[SlotDescription, ...]
