"""Bytes from anywhere: `kvferry.wire` gives a message or a `ValueError`, in bounded memory.

The corpus in ``corpus/wire`` holds messages of every kind (``valid-…``) and bytes that once looked
dangerous (``refused-…``); hypothesis changes the former. To search longer than the tests do, give
the number of examples of each test::

    KVFERRY_FUZZ_EXAMPLES=100000 python -m pytest tests/fuzz

Bytes that fail belong into the corpus, under a name that says what they are.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import EXAMPLES, bounded_memory

from kvferry import EngineSpec, RankDescription, Route, wire
from kvferry.wire import forms

CORPUS = {
    path.stem: path.read_bytes() for path in sorted(Path(__file__).parent.glob("corpus/wire/*"))
}
VALID = {name: data for name, data in CORPUS.items() if name.startswith("valid-")}
REFUSED = {name: data for name, data in CORPUS.items() if name.startswith("refused-")}


def check(data: bytes) -> None:
    """Decode what may be anything; whatever is accepted must be as good as made here."""
    with bounded_memory():
        _check(data)


def _check(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except ValueError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert type(error) is ValueError and 0 < len(str(error)) < 1000
        return
    again = wire.encode(message)
    assert wire.decode(again, type(message)) == message
    assert wire.encode(wire.decode(again)) == again
    if isinstance(message, EngineSpec):
        assert len(wire.fingerprint(message)) == 64
        try:
            message.tensor_slots(0)
            Route(message, message).readers(0)
        except ValueError:
            pass  # tensors may be larger than memory
    elif isinstance(message, RankDescription):
        assert len(message.slots) <= wire.MAX_SLOTS


def test_there_is_a_corpus():
    kinds = {type(wire.decode(data)) for data in VALID.values()}
    assert kinds == {EngineSpec, RankDescription, wire.TransferRequest}
    assert len(REFUSED) >= 15
    assert {*VALID, *REFUSED} == {*CORPUS}


@pytest.mark.parametrize("name", VALID)
def test_the_corpus_of_messages_is_read(name):
    """Bytes of an earlier version stay readable; what is encoded may gain fields."""
    check(VALID[name])
    wire.decode(VALID[name])


@pytest.mark.parametrize("name", REFUSED)
def test_the_corpus_of_hostile_bytes_is_refused(name):
    with pytest.raises(ValueError, match=r"message|not a valid"):
        wire.decode(REFUSED[name])


# First bytes of every kind of msgpack value, and of sizes up to the largest.
HEADS = [
    *(b"\x80", b"\x8f", b"\x90", b"\x9f", b"\xa0", b"\xbf", b"\xc0", b"\xc1", b"\xc2", b"\xc3"),
    *(b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\xff\x05", b"\xc9\xff\xff\xff"),
    *(b"\xca", b"\xcb", b"\xcc", b"\xcd", b"\xce", b"\xcf", b"\xd0", b"\xd1", b"\xd2", b"\xd3"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcf\x7f" + b"\xff" * 7),
    *(b"\xd4\xff\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xd8\xff" + b"\x00" * 16),
    *(b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdb\x00\x00\x00\x01"),
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\x00\x01", b"\xdd\x10\x00\x00\x00"),
    *(b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdf\x00\x00\x00\x00", b"\xdf\x80\x00\x00\x00"),
    *(b"\x91" * 40, b"\x81\xa1a" * 40, b"\xdd\x00\x00\x00\x20" * 8, b"\xff", b"\xe0", b"\x7f"),
]  # fmt: skip


@st.composite
def changed_bytes(draw):
    """Change a message in a few places, knowing only where bytes are."""
    data = bytearray(VALID[draw(st.sampled_from(sorted(VALID)))])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        if draw(st.integers(0, 3)):
            at = max(at, min(11, len(data)))  # most of the time behind the magic
        how = draw(st.sampled_from(["set", "head", "insert", "delete", "repeat", "cut", "swap"]))
        size = draw(st.integers(1, 12))
        if how == "set":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "head":
            head = draw(st.sampled_from(HEADS))
            data[at : at + draw(st.sampled_from([1, len(head)]))] = head
        elif how == "insert":
            data[at:at] = draw(st.one_of(st.binary(max_size=12), st.sampled_from(HEADS)))
        elif how == "delete":
            del data[at : at + size]
        elif how == "repeat":
            data[at:at] = data[at : at + 4 * size] * draw(st.integers(1, 8))
        elif how == "cut":
            del data[at:]
        else:
            other = VALID[draw(st.sampled_from(sorted(VALID)))]
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


numbers = st.one_of(
    st.integers(-2, 17),
    st.sampled_from(
        [s * 2**p + d for s in (1, -1) for p in (8, 14, 31, 32, 48, 62) for d in (-1, 0, 1)]
    ),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
)
scalars = st.one_of(
    numbers, st.none(), st.booleans(), st.floats(), st.text(max_size=4), st.binary(max_size=9)
)
names = st.one_of(
    st.sampled_from(["type", "layers", "parts", "shape", "groups", "slots", "head_ranges"]),
    st.text(max_size=2),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def changed_values(draw):
    """Change a message in a few places, keeping it msgpack, so that fields are reached."""
    root = msgspec.msgpack.decode(VALID[draw(st.sampled_from(sorted(VALID)))])
    for _ in range(draw(st.integers(1, 3))):
        node = root if draw(st.integers(0, 9)) == 0 else root[4]
        while isinstance(node, dict | list) and node:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(keys))
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
                how = draw(st.sampled_from(["set", "set", "set", "drop", "repeat"]))
                if how == "drop":
                    del node[key]
                elif how == "repeat" and isinstance(node, list):
                    node[key:key] = [inner] * draw(st.integers(1, 20))
                else:
                    like = numbers if isinstance(inner, int) else values
                    node[key] = draw(st.one_of(like, values))
                break
            node = inner
        if len(root) < 5:
            break  # no body is left to change
    return msgspec.msgpack.encode(root)


@settings(max_examples=EXAMPLES)
@given(changed_bytes())
def test_changed_bytes(data):
    check(data)


@settings(max_examples=EXAMPLES)
@given(changed_values())
def test_changed_values(data):
    check(data)


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(sorted(forms.KINDS)), st.lists(st.one_of(st.sampled_from(HEADS), st.binary()))
)
def test_any_bytes(kind, pieces):
    body = b"".join(pieces)
    check(body)
    check(b"\x95\xa7kvferry\x01\x00" + msgspec.msgpack.encode(kind) + body)
