"""Wire forms: what two engines tell each other, as bytes that any msgpack library can read.

`encode` and `decode` carry three messages: an `EngineSpec` and a `RankDescription` when peers meet,
a `TransferRequest` for each request. `fingerprint` says in one string whether two engines fit.

A message comes from another process, so nothing in it is believed. It is walked once, before it is
turned into objects: its size, nesting, number of values and text lengths stay under the bounds
below, and every length that it declares is covered by bytes that are there. What it may hold at
most is therefore known before anything is built from it. docs/wire.md describes the bytes.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.cache import RankDescription
from kvferry.specs import AttentionGroup, EngineSpec, Group, LatentGroup, ModelSpec

__all__ = [
    "MAX_DEPTH",
    "MAX_DIMENSIONS",
    "MAX_GROUPS",
    "MAX_IDS_PER_GROUP",
    "MAX_LAYERS",
    "MAX_MESSAGE_BYTES",
    "MAX_SHARDS",
    "MAX_SLOTS",
    "MAX_STATE_PARTS",
    "MAX_TEXT_BYTES",
    "MAX_VALUES",
    "VERSION",
    "Message",
    "TransferRequest",
    "decode",
    "encode",
    "fingerprint",
]

#: Major and minor version written. A reader takes every minor version of its major one.
VERSION = (1, 0)

#: Bytes of a message: room for a group's most ids at eight bytes each, and as much again.
MAX_MESSAGE_BYTES = 64 << 20
#: Block ids of one group: a request of four million tokens at one token a block.
MAX_IDS_PER_GROUP = 4 << 20
#: Values of a message, keys and containers included: an object takes some hundred bytes, so 25 MiB.
#: The largest honest message, a rank of `MAX_SLOTS` tensors of seven axes, stays below.
MAX_VALUES = 1 << 18
#: Arrays and maps inside one another; the deepest form, a state part's shape, has eight.
MAX_DEPTH = 16
#: UTF-8 bytes of a string: names and ids, which errors repeat.
MAX_TEXT_BYTES = 4096
#: Groups of a model: more than any model has layers.
MAX_GROUPS = 1024
#: Layers of a group: some thirty times those of the deepest models.
MAX_LAYERS = 4096
#: Parts of a recurrent state.
MAX_STATE_PARTS = 64
#: Axes of a state part or tensor; numpy's limit.
MAX_DIMENSIONS = 64
#: Tensors of one rank: a key and a value for each of `MAX_LAYERS`.
MAX_SLOTS = 2 * MAX_LAYERS
#: Ranks of a stage times groups and state parts. Engines and routes keep an interval of heads for
#: each, so 16 MiB.
MAX_SHARDS = 1 << 20

_MAGIC = b"\xa7kvferry"  # a msgpack string of seven bytes
_MAX_SHOWN = 300
_INT64_END = 1 << 63


class TransferRequest(msgspec.Struct, frozen=True, eq=False):
    """One side's part of one request: what `Route.plan` must know of a peer's blocks.

    Parameters
    ----------
    request_id
        Names the request to both peers.
    blocks
        Block ids, one list or integer array a group of the sender's model, in its group order; the
        null block may be among them. Kept as read-only arrays [ids] of int64 (uint64 where an id
        needs that), copies of what was given.
    tokens
        ``(start, end)`` token positions of the request.
    first_tokens
        Token at which each group's list begins, one a group; empty: 0 for all.

    Raises
    ------
    ValueError
        A field is of the wrong kind, negative, too large or too long; ``start > end``; or the
        numbers of groups differ. The message names the field.

    Examples
    --------
    >>> request = TransferRequest("r1", blocks=[[7, 3], range(4)], tokens=(0, 40))
    >>> request.first_tokens
    (0, 0)
    >>> request.blocks[0]
    array([7, 3])
    >>> decode(encode(request), TransferRequest) == request
    True
    """

    request_id: str
    blocks: tuple[npt.NDArray[np.integer[Any]], ...]
    tokens: tuple[int, int]
    first_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id={_shown(repr(self.request_id))} is not a string")
        lists = _sequence("blocks", self.blocks, "one list of block ids a group", MAX_GROUPS)
        blocks = tuple(_ids(f"blocks[{g}]", ids) for g, ids in enumerate(lists))
        tokens = _tokens("tokens", self.tokens, 2)
        if len(tokens) != 2:
            raise ValueError(f"tokens={tokens} is not a (start, end) pair")
        if tokens[0] > tokens[1]:
            raise ValueError(f"tokens={tokens} starts after it ends")
        first_tokens = _tokens("first_tokens", self.first_tokens, MAX_GROUPS) or (0,) * len(blocks)
        if len(first_tokens) != len(blocks):
            raise ValueError(
                f"first_tokens has {len(first_tokens)} entries for {len(blocks)} groups of blocks"
            )
        msgspec.structs.force_setattr(self, "blocks", blocks)
        msgspec.structs.force_setattr(self, "tokens", tokens)
        msgspec.structs.force_setattr(self, "first_tokens", first_tokens)

    def _scalars(self) -> tuple[Any, ...]:
        return self.request_id, self.tokens, self.first_tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferRequest):
            return NotImplemented
        # As many first tokens are as many groups.
        return self._scalars() == other._scalars() and all(
            map(np.array_equal, self.blocks, other.blocks)
        )

    def __hash__(self) -> int:
        return hash(self._scalars())


Message = EngineSpec | RankDescription | TransferRequest
_Bytes = bytes | bytearray | memoryview
_M = TypeVar("_M", bound=Message)

_KINDS: dict[str, type[Message]] = {
    "engine": EngineSpec,
    "rank": RankDescription,
    "request": TransferRequest,
}


def encode(message: Message) -> bytes:
    r"""Return a message as bytes, which `decode` of this or a later minor version takes.

    Parameters
    ----------
    message
        An `EngineSpec`, `RankDescription` or `TransferRequest`.

    Returns
    -------
    bytes
        The same for the same message, everywhere; at most `MAX_MESSAGE_BYTES`.

    Raises
    ------
    TypeError
        `message` is none of these.
    ValueError
        It exceeds a bound of this module, or holds what its fields do not allow.

    Examples
    --------
    >>> encode(TransferRequest("r1", [[7, 3]], tokens=(0, 32)))[:8]
    b'\x95\xa7kvferr'
    """
    name = next((name for name, kind in _KINDS.items() if isinstance(message, kind)), None)
    if name is None:
        raise TypeError(
            f"expected an EngineSpec, a RankDescription or a TransferRequest, got {type(message)}"
        )
    body = _WireRequest.of(message) if isinstance(message, TransferRequest) else message
    try:
        data = msgspec.msgpack.encode(("kvferry", *VERSION, name, body))
    except (ValueError, TypeError, OverflowError) as error:
        raise _refusal(_KINDS[name], error) from error
    # What no peer would take is refused here, where its maker can see why.
    decode(data)
    return data


@overload
def decode(data: _Bytes, kind: None = None) -> Message: ...
@overload
def decode(data: _Bytes, kind: type[_M]) -> _M: ...


def decode(data: _Bytes, kind: type[Any] | None = None) -> Message:
    """Return the message that bytes stand for, or say what is wrong with them.

    Parameters
    ----------
    data
        What `encode` returned, as bytes or any contiguous buffer. Nothing of it is kept.
    kind
        `EngineSpec`, `RankDescription` or `TransferRequest`: what the message must be. ``None``:
        any of them.

    Returns
    -------
    EngineSpec, RankDescription or TransferRequest
        Checked as if it had been made here. Fields that this version does not know are ignored. A
        `RankDescription` is checked against its engine where it is used, as in
        `Plan.descriptors`.

    Raises
    ------
    ValueError
        The bytes are no message, one of another kind or major version, cut short, malformed, larger
        than a bound of this module, or hold what a field does not allow.
    TypeError
        `data` is no buffer of bytes, or `kind` is not one of the three.

    Examples
    --------
    >>> data = encode(TransferRequest("r1", [[7, 3]], tokens=(0, 32)))
    >>> decode(data, TransferRequest).tokens
    (0, 32)
    >>> decode(data[:-1])
    Traceback (most recent call last):
    ...
    ValueError: malformed kvferry message: array of 1 at byte 80 exceeds the 81 bytes there are
    """
    if kind is not None and kind not in _KINDS.values():
        raise TypeError(f"kind must be one of {_names(_KINDS.values())}, got {kind!r}")
    num_bytes = memoryview(data).nbytes
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes exceeds {MAX_MESSAGE_BYTES}")
    # A copy unless these are bytes: another thread may write to a buffer between walk and reading.
    data = bytes(data)
    _check_start(data)
    _walk(data)
    try:
        envelope = _ENVELOPES.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"malformed kvferry message: {_shown(str(error))}") from error
    found = _KINDS.get(envelope.kind)
    if found is None:
        raise ValueError(
            f"a message of kind {_shown(repr(envelope.kind))} is none of {' '.join(_KINDS)}"
        )
    if kind is not None and found is not kind:
        raise ValueError(f"expected {_named(kind)}, the message holds {_named(found)}")
    try:
        return _READERS[found](envelope.body)
    # Before version 0.20, msgspec's errors were no ValueErrors.
    except (msgspec.MsgspecError, ValueError) as error:
        raise _refusal(found, error) from error


def fingerprint(engine: EngineSpec | ModelSpec) -> str:
    """Return what makes two engines compatible, as a string: equal where a `Route` can be made.

    It stands for every layer's index and kind of cache with its heads, sizes, dtype, sliding window
    and tokens a slot. Names, groupings, sharding, layouts and tokens a block do not enter. Engines
    of which one lacks layers (``allow_missing_layers``) have different fingerprints.

    Parameters
    ----------
    engine
        An engine, or the model that it serves.

    Returns
    -------
    str
        64 hexadecimal digits, the same on every machine and in every version of kvferry with the
        same major wire version.

    Raises
    ------
    TypeError
        `engine` is neither.

    Examples
    --------
    >>> model = ModelSpec((AttentionGroup(layers=range(4), num_kv_heads=8, head_dim=128),))
    >>> fingerprint(model) == fingerprint(model.regroup([[0, 2], [1, 3]]))
    True
    >>> fingerprint(model)[:16]
    'f5c16598efacbbe5'
    """
    model = engine.model if isinstance(engine, EngineSpec) else engine
    if not isinstance(model, ModelSpec):
        raise TypeError(f"expected an EngineSpec or a ModelSpec, got {type(engine)}")
    layers = []
    for group in model.groups:
        geometry = _geometry(group)
        # A layer may have a state beside its attention; the two never stand for each other.
        layers += [(layer, geometry[0] == "state", geometry) for layer in group.layers]
    layers.sort(key=lambda entry: entry[:2])
    named = [(layer, geometry) for layer, _, geometry in layers]
    return hashlib.sha256(msgspec.json.encode(("kvferry", VERSION[0], named))).hexdigest()


def _geometry(group: Group) -> tuple[Any, ...]:
    """Return all that two groups with a layer in common must agree on, defaults filled in."""
    if isinstance(group, AttentionGroup):
        value_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
        sizes = (group.num_kv_heads, group.head_dim, value_dim)
        return "attention", *sizes, group.dtype, group.sliding_window, group.tokens_per_slot
    if isinstance(group, LatentGroup):
        return "latent", group.latent_dim, group.dtype, group.tokens_per_slot
    parts = []
    for part in group.parts:
        axis, units = part.shard_axis, part.shard_units
        if axis is not None and units is None:
            units = part.shape[axis]
        parts.append((part.name, part.shape, part.dtype, axis, units))
    return "state", parts


class _Envelope(msgspec.Struct, array_like=True):
    """What every message begins with. Its first three fields stay what they are in any version."""

    magic: str
    major: int
    minor: int
    kind: str
    body: msgspec.Raw


class _WireIds(msgspec.Struct, array_like=True):
    """Block ids of one group, packed, so that numpy takes them in one copy, however many."""

    dtype: str
    packed: memoryview


class _WireRequest(msgspec.Struct):
    """A `TransferRequest` as it travels."""

    request_id: str
    blocks: Annotated[tuple[_WireIds, ...], Meta(max_length=MAX_GROUPS)]
    tokens: tuple[int, int]
    first_tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_GROUPS)] = ()

    @classmethod
    def of(cls, request: TransferRequest) -> _WireRequest:
        blocks = []
        for ids in request.blocks:
            dtype = _narrowest(ids)
            blocks.append(_WireIds(dtype, ids.astype(dtype, copy=False).data.cast("B")))
        return cls(request.request_id, tuple(blocks), request.tokens, request.first_tokens)

    def request(self) -> TransferRequest:
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


_ENVELOPES = msgspec.msgpack.Decoder(_Envelope)
_REQUESTS = msgspec.msgpack.Decoder(_WireRequest)
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


_READERS: dict[type[Message], Callable[[msgspec.Raw], Message]] = {
    EngineSpec: _read_engine,
    RankDescription: _read_rank,
    TransferRequest: _read_request,
}


def _check_start(data: bytes) -> None:
    """Refuse other people's bytes and other major versions, whatever follows in these."""
    start = 1 + len(_MAGIC)
    # An array of five to fifteen values, of which the second and third are numbers below 128.
    is_ours = len(data) >= start + 2 and 0x95 <= data[0] <= 0x9F and data[1:start] == _MAGIC
    if not is_ours or max(data[start : start + 2]) >= 0x80:
        raise ValueError(
            f"not a kvferry message: expected one that begins with the array of "
            f"'kvferry' and two version numbers, got {len(data)} bytes {data[: start + 2]!r}"
        )
    major, minor = data[start], data[start + 1]
    if major != VERSION[0]:
        raise ValueError(
            f"the message is of wire version {major}.{minor}, this kvferry reads "
            f"{VERSION[0]}.x and writes {VERSION[0]}.{VERSION[1]}"
        )


# What a msgpack value's first byte says: its kind, how many bytes hold its size, and its size where
# these are none. Sizes count bytes, values or pairs. Extension types have no place in the forms.
_Head = tuple[str, int, int]
_HEADS: dict[int, _Head] = {
    **dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], ("number", 0, 0)),
    **{0x80 + size: ("map", 0, size) for size in range(16)},
    **{0x90 + size: ("array", 0, size) for size in range(16)},
    **{0xA0 + size: ("string", 0, size) for size in range(32)},
    **{0xC4 + power: ("binary", 1 << power, 0) for power in range(3)},
    **{0xCA + power: ("number", 0, 4 << power) for power in range(2)},
    **{first + power: ("number", 0, 1 << power) for first in (0xCC, 0xD0) for power in range(4)},
    **{0xD9 + power: ("string", 1 << power, 0) for power in range(3)},
    **{0xDC + power: ("array", 2 << power, 0) for power in range(2)},
    **{0xDE + power: ("map", 2 << power, 0) for power in range(2)},
}


def _walk(data: bytes) -> None:
    """Check the structure of one msgpack value that fills `data`, building nothing from it.

    msgspec on its own takes what this refuses: a key given twice (the last one wins, elsewhere
    perhaps the first), nesting up to the interpreter's limit, and a hundred bytes of objects for
    each byte of a message.
    """
    end = len(data)
    at = 0
    values = 1
    left = 1  # values still to come in the innermost container; in a map, keys count too
    keys: set[bytes] | None = None  # those seen, where that is a map
    outer: list[tuple[int, set[bytes] | None]] = []
    while left or outer:
        if not left:
            left, keys = outer.pop()
            continue
        kind, size, begin = _head(data, at)
        if kind == "map" or kind == "array":
            count = 2 * size if kind == "map" else size
            if count > end - begin:  # each takes a byte at least
                raise _malformed(f"{kind} of {size} at byte {at} exceeds the {end} bytes there are")
            values += count
            if values > MAX_VALUES:
                raise _malformed(f"it holds more than {MAX_VALUES} values")
        elif kind == "string" and size > MAX_TEXT_BYTES:
            raise _malformed(f"string of {size} bytes at byte {at} is longer than {MAX_TEXT_BYTES}")
        elif size > end - begin:
            raise _malformed(f"{kind} of {size} bytes at byte {at} exceeds the {end} there are")
        if keys is not None and left % 2 == 0:
            key = data[begin : begin + size]
            if kind != "string" or key in keys:
                what = f"given twice: {_shown(repr(key))}" if kind == "string" else "no string"
                raise _malformed(f"the map key at byte {at} is {what}")
            keys.add(key)
        left -= 1
        if kind == "map" or kind == "array":
            outer.append((left, keys))
            if len(outer) > MAX_DEPTH:
                raise _malformed(f"it is nested more than {MAX_DEPTH} levels deep")
            left, keys = count, set() if kind == "map" else None
            at = begin
        else:
            at = begin + size
    if at != end:
        raise _malformed(f"{end - at} bytes follow its end at byte {at}")


def _head(data: bytes, at: int) -> _Head:
    """Return the kind of the value at a byte, its size, and where what it counts begins."""
    if at >= len(data):
        raise _malformed(f"it ends at byte {at}, inside an array or map")
    head = _HEADS.get(data[at])
    if head is None:
        raise _malformed(f"byte {at} is 0x{data[at]:02x}, which begins no value that is used here")
    kind, length_bytes, size = head
    begin = at + 1 + length_bytes
    if begin > len(data):
        raise _malformed(f"it ends at byte {len(data)}, inside the size of a {kind}")
    if length_bytes:
        size = int.from_bytes(data[at + 1 : begin], "big")
    return kind, size, begin


_PACKINGS = ("<i4", "<i8", "<u8")


def _narrowest(ids: npt.NDArray[np.integer[Any]]) -> str:
    """Return the packing that holds all ids in the fewest bytes."""
    if ids.dtype == np.uint64:
        return "<u8"
    fits = not ids.size or (ids.min() >= -(1 << 31) and ids.max() < 1 << 31)
    return "<i4" if fits else "<i8"


def _unpacked(field: str, ids: _WireIds) -> npt.NDArray[np.integer[Any]]:
    """Return a view of packed ids."""
    if ids.dtype not in _PACKINGS:
        raise ValueError(
            f"{field} is packed as {_shown(repr(ids.dtype))}, none of {' '.join(_PACKINGS)}"
        )
    dtype = np.dtype(ids.dtype)
    if ids.packed.nbytes % dtype.itemsize:
        raise ValueError(
            f"{field} has {ids.packed.nbytes} bytes, no multiple of the {dtype.itemsize} of an id"
        )
    return np.frombuffer(ids.packed, dtype)


def _ids(field: str, ids: Any) -> npt.NDArray[np.integer[Any]]:
    """Return a read-only copy of one group's block ids."""
    try:
        count = len(ids)
    except OverflowError:
        count = MAX_IDS_PER_GROUP + 1  # a range longer than any list
    except TypeError as error:
        raise ValueError(f"{field} is no list or array of block ids") from error
    if count > MAX_IDS_PER_GROUP:
        raise ValueError(f"{field} holds more than {MAX_IDS_PER_GROUP} ids")
    try:
        array = np.asarray(ids)
        # Of 2^63 beside a small number, numpy makes floats.
        if array.dtype.kind in "fO" and all(isinstance(block, int) and block >= 0 for block in ids):
            array = np.array(ids, np.uint64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{field} is no list or array of block ids: {error}") from error
    if array.ndim != 1 or (count and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{field} is no list or one-dimensional array of integers in [-2^63, 2^63) or [0, 2^64)"
        )
    # Only what no int64 holds is kept as it is: a null block id may be such a number.
    is_far = count and array.dtype.kind == "u" and int(array.max()) >= _INT64_END
    array = np.array(array, np.uint64 if is_far else np.int64)
    array.flags.writeable = False
    return array


def _sequence(field: str, value: Any, what: str, limit: int) -> list[Any]:
    """Return the items of what should be a short sequence."""
    items: list[Any] = []
    if isinstance(value, str | bytes | dict):
        raise ValueError(f"{field}={_shown(repr(value))} is not {what}")
    try:
        for item in value:
            if len(items) == limit:
                raise ValueError(f"{field} has more than {limit} entries")
            items.append(item)
    except TypeError as error:
        raise ValueError(f"{field}={_shown(repr(value))} is not {what}") from error
    return items


def _tokens(field: str, value: Any, limit: int) -> tuple[int, ...]:
    """Return token positions as plain integers."""
    tokens = []
    for item in _sequence(field, value, "a sequence of token positions", limit):
        try:
            token = operator.index(item)
        except TypeError:
            token = -1
        if not 0 <= token < _INT64_END:
            raise ValueError(f"{field} holds {_shown(repr(item))}, no integer in [0, 2^63)")
        tokens.append(token)
    return tuple(tokens)


def _malformed(why: str) -> ValueError:
    return ValueError(f"malformed kvferry message: {why}")


def _refusal(kind: type[Message], error: Exception) -> ValueError:
    return ValueError(f"not a valid {kind.__name__}: {_shown(str(error))}")


def _named(kind: type[Message]) -> str:
    return f"{'an' if kind is EngineSpec else 'a'} {kind.__name__}"


def _names(kinds: Any) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _shown(text: str) -> str:
    """Shorten what a peer wrote: it may have the size of a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
