"""`TransferRequest`: what one side asks of the other for one request."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.wire.limits import MAX_GROUPS, MAX_IDS_PER_GROUP, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry._types import Integers

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
    >>> from kvferry.wire import decode, encode
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

    if TYPE_CHECKING:  # sequences of any kind become tuples of arrays, or of tokens

        def __init__(
            self,
            request_id: str,
            blocks: Sequence[Integers],
            tokens: tuple[int, int],
            first_tokens: Integers = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id={shown(repr(self.request_id))} is not a string")
        lists = _sequence("blocks", self.blocks, "one list of block ids a group", MAX_GROUPS)
        blocks = tuple(_read_ids(f"blocks[{g}]", ids) for g, ids in enumerate(lists))
        tokens = _read_tokens("tokens", self.tokens, 2)
        if len(tokens) != 2:
            raise ValueError(f"tokens={tokens} is not a (start, end) pair")
        if tokens[0] > tokens[1]:
            raise ValueError(f"tokens={tokens} starts after it ends")
        first_tokens = _read_tokens("first_tokens", self.first_tokens, MAX_GROUPS) or (0,) * len(
            blocks
        )
        if len(first_tokens) != len(blocks):
            raise ValueError(
                f"first_tokens has length {len(first_tokens)}, blocks has length {len(blocks)}"
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


def _read_ids(field: str, ids: Any) -> npt.NDArray[np.integer[Any]]:
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
        raise ValueError(f"{field}={shown(repr(value))} is not {what}")
    try:
        for item in value:
            if len(items) == limit:
                raise ValueError(f"{field} has more than {limit} entries")
            items.append(item)
    except TypeError as error:
        raise ValueError(f"{field}={shown(repr(value))} is not {what}") from error
    return items


def _read_tokens(field: str, value: Any, limit: int) -> tuple[int, ...]:
    """Return token positions as plain integers."""
    tokens = []
    for item in _sequence(field, value, "a sequence of token positions", limit):
        try:
            token = operator.index(item)
        except TypeError:
            token = -1
        if not 0 <= token < _INT64_END:
            raise ValueError(f"{field} holds {shown(repr(item))}, no integer in [0, 2^63)")
        tokens.append(token)
    return tuple(tokens)
