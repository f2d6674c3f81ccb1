"""The forms in which messages travel, and the bounds that hold before one is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.cache import RankDescription
from kvferry.specs import EngineSpec
from kvferry.wire.limits import (
    MAX_DIMENSIONS,
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_SHARDS,
    MAX_SLOTS,
    MAX_STATE_PARTS,
    shown,
)
from kvferry.wire.request import TransferRequest

Message = EngineSpec | RankDescription | TransferRequest

KINDS: dict[str, type[Message]] = {
    "engine": EngineSpec,
    "rank": RankDescription,
    "request": TransferRequest,
}


class Envelope(msgspec.Struct, array_like=True):
    """What every message begins with. Its first three fields stay what they are in any version."""

    magic: str
    major: int
    minor: int
    kind: str
    body: msgspec.Raw


class WireIds(msgspec.Struct, array_like=True):
    """Block ids of one group, packed, so that numpy takes them in one copy, however many."""

    dtype: str
    packed: memoryview


class WireRequest(msgspec.Struct):
    """A `TransferRequest` as it travels."""

    request_id: str
    blocks: Annotated[tuple[WireIds, ...], Meta(max_length=MAX_GROUPS)]
    tokens: tuple[int, int]
    first_tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_GROUPS)] = ()

    @classmethod
    def of(cls, request: TransferRequest) -> WireRequest:
        """Pack a request."""
        blocks = []
        for ids in request.blocks:
            dtype = _narrowest(ids)
            blocks.append(WireIds(dtype, ids.astype(dtype, copy=False).data.cast("B")))
        return cls(request.request_id, tuple(blocks), request.tokens, request.first_tokens)

    def request(self) -> TransferRequest:
        """Unpack it again."""
        blocks = tuple(_unpacked(f"blocks[{g}]", ids) for g, ids in enumerate(self.blocks))
        return TransferRequest(self.request_id, blocks, self.tokens, self.first_tokens)


# Parts of the forms with the bounds that must hold before the whole is built; the rest is skipped.


class _PartBounds(msgspec.Struct):
    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]


class _GroupBounds(msgspec.Struct):
    layers: Annotated[tuple[int, ...], Meta(max_length=MAX_LAYERS)]
    parts: Annotated[tuple[_PartBounds, ...], Meta(max_length=MAX_STATE_PARTS)] = ()


class _ModelBounds(msgspec.Struct):
    groups: Annotated[tuple[_GroupBounds, ...], Meta(max_length=MAX_GROUPS)]


class _EngineBounds(msgspec.Struct):
    model: _ModelBounds
    tp_size: int = 1
    cp_size: int = 1


class _SlotBounds(msgspec.Struct):
    sizes: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]
    strides: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)]


class _RankBounds(msgspec.Struct):
    slots: Annotated[tuple[_SlotBounds, ...], Meta(max_length=MAX_SLOTS)]


ENVELOPES = msgspec.msgpack.Decoder(Envelope)
_REQUESTS = msgspec.msgpack.Decoder(WireRequest)
_ENGINE_BOUNDS = msgspec.msgpack.Decoder(_EngineBounds)
_ENGINES = msgspec.msgpack.Decoder(EngineSpec)
_RANK_BOUNDS = msgspec.msgpack.Decoder(_RankBounds)
_RANKS = msgspec.msgpack.Decoder(RankDescription)


def _read_engine(body: msgspec.Raw) -> EngineSpec:
    bounds = _ENGINE_BOUNDS.decode(body)
    groups = bounds.model.groups
    shards = bounds.tp_size * bounds.cp_size * sum(max(1, len(group.parts)) for group in groups)
    if shards > MAX_SHARDS:
        raise ValueError(
            f"tp_size * cp_size = {bounds.tp_size} * {bounds.cp_size} ranks times the groups and "
            f"state parts is {shards}, more than {MAX_SHARDS}"
        )
    slots = sum(len(group.layers) * max(2, len(group.parts)) for group in groups)
    if slots > MAX_SLOTS:
        raise ValueError(f"the model may have {slots} tensors, more than {MAX_SLOTS}")
    return _ENGINES.decode(body)


def _read_rank(body: msgspec.Raw) -> RankDescription:
    for s, slot in enumerate(_RANK_BOUNDS.decode(body).slots):
        if len(slot.sizes) != len(slot.strides):
            raise ValueError(
                f"slots[{s}] has {len(slot.sizes)} sizes and {len(slot.strides)} strides"
            )
    return _RANKS.decode(body)


def _read_request(body: msgspec.Raw) -> TransferRequest:
    return _REQUESTS.decode(body).request()


READERS: dict[type[Message], Callable[[msgspec.Raw], Message]] = {
    EngineSpec: _read_engine,
    RankDescription: _read_rank,
    TransferRequest: _read_request,
}


_PACKINGS = ("<i4", "<i8", "<u8")


def _narrowest(ids: npt.NDArray[np.integer[Any]]) -> str:
    """Return the packing that holds all ids in the fewest bytes."""
    if ids.dtype == np.uint64:
        return "<u8"
    fits = not ids.size or (ids.min() >= -(1 << 31) and ids.max() < 1 << 31)
    return "<i4" if fits else "<i8"


def _unpacked(field: str, ids: WireIds) -> npt.NDArray[np.integer[Any]]:
    """Return a view of packed ids."""
    if ids.dtype not in _PACKINGS:
        raise ValueError(
            f"{field} is packed as {shown(repr(ids.dtype))}, none of {' '.join(_PACKINGS)}"
        )
    dtype = np.dtype(ids.dtype)
    if ids.packed.nbytes % dtype.itemsize:
        raise ValueError(
            f"{field} has {ids.packed.nbytes} bytes, no multiple of the {dtype.itemsize} of an id"
        )
    return np.frombuffer(ids.packed, dtype)
