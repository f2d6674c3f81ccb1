"""Wire forms: what two engines tell each other, as bytes that any msgpack library can read.

`encode` and `decode` carry three messages: an `EngineSpec` and a `RankDescription` when peers meet,
a `TransferRequest` for each request. `fingerprint` says in one string whether two engines fit.

A message comes from another process, so nothing in it is believed. It is walked once, before it is
turned into objects: its size, nesting, number of values and text lengths stay under the bounds
below, and every length that it declares is covered by bytes that are there. What it may hold at
most is therefore known before anything is built from it. docs/wire.md describes the bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

from kvferry.specs import EngineSpec
from kvferry.wire.compatibility import fingerprint
from kvferry.wire.forms import ENVELOPES, KINDS, READERS, Message, WireRequest
from kvferry.wire.limits import (
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_GROUPS,
    MAX_IDS_PER_GROUP,
    MAX_LAYERS,
    MAX_MESSAGE_BYTES,
    MAX_SHARDS,
    MAX_SLOTS,
    MAX_STATE_PARTS,
    MAX_TEXT_BYTES,
    MAX_VALUES,
    VERSION,
    shown,
)
from kvferry.wire.request import TransferRequest
from kvferry.wire.scan import check_start, walk

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

_Bytes = bytes | bytearray | memoryview
_M = TypeVar("_M", bound=Message)


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
    name = next((name for name, kind in KINDS.items() if isinstance(message, kind)), None)
    if name is None:
        raise TypeError(
            f"expected an EngineSpec, a RankDescription or a TransferRequest, got {type(message)}"
        )
    body = WireRequest.of(message) if isinstance(message, TransferRequest) else message
    try:
        data = msgspec.msgpack.encode(("kvferry", *VERSION, name, body))
    except (ValueError, TypeError, OverflowError) as error:
        raise _refusal(KINDS[name], error) from error
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
    if kind is not None and kind not in KINDS.values():
        raise TypeError(f"kind must be one of {_names(KINDS.values())}, got {kind!r}")
    num_bytes = memoryview(data).nbytes
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes exceeds {MAX_MESSAGE_BYTES}")
    # A copy unless these are bytes: another thread may write to a buffer between walk and reading.
    data = bytes(data)
    check_start(data)
    walk(data)
    try:
        envelope = ENVELOPES.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"malformed kvferry message: {shown(str(error))}") from error
    found = KINDS.get(envelope.kind)
    if found is None:
        raise ValueError(
            f"a message of kind {shown(repr(envelope.kind))} is none of {' '.join(KINDS)}"
        )
    if kind is not None and found is not kind:
        raise ValueError(f"expected {_named(kind)}, the message holds {_named(found)}")
    try:
        return READERS[found](envelope.body)
    # Before version 0.20, msgspec's errors were no ValueErrors.
    except (msgspec.MsgspecError, ValueError) as error:
        raise _refusal(found, error) from error


def _refusal(kind: type[Message], error: Exception) -> ValueError:
    return ValueError(f"not a valid {kind.__name__}: {shown(str(error))}")


def _named(kind: type[Message]) -> str:
    return f"{'an' if kind is EngineSpec else 'a'} {kind.__name__}"


def _names(kinds: Any) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
