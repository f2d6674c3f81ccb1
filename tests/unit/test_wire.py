"""Wire forms: round trips, versions, and what is refused, with a message that says why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engines import attention_model, hybrid_engine, hybrid_model, label, make_engine, source_cache
from hypothesis import given
from hypothesis import strategies as st

from kvferry import (
    AttentionGroup,
    EngineSpec,
    LatentGroup,
    ModelSpec,
    RankDescription,
    Route,
    StateGroup,
    StatePart,
    wire,
)
from kvferry.errors import IncompatibleEnginesError, KVFerryError, LayoutError
from kvferry.wire import TransferRequest, decode, encode, fingerprint

REQUEST = TransferRequest("r1", [[7, 3], range(4)], tokens=(5, 40), first_tokens=(0, 16))
DESCRIPTION = source_cache(make_engine()).describe()
MESSAGES = {
    "engine": hybrid_engine(),
    "rank": DESCRIPTION,
    "request": REQUEST,
}


def unpacked(message):
    """Take a message apart, so that a test can put it together wrongly."""
    return msgspec.msgpack.decode(encode(message))


def with_body(name, **fields):
    """Make the bytes of a message with some fields of its body replaced or added."""
    envelope = unpacked(MESSAGES[name])
    envelope[4] |= fields
    return msgspec.msgpack.encode(envelope)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_come_back_equal(name):
    message = MESSAGES[name]
    data = encode(message)
    for given_data in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert decode(given_data) == message
    assert decode(data, type(message)) == message
    assert encode(decode(data)) == data


def test_a_received_engine_is_one_like_any_other():
    engine = decode(encode(hybrid_engine()), EngineSpec)
    assert engine.tensor_slots(1)[0].name == hybrid_engine().tensor_slots(1)[0].name
    assert hash(engine) == hash(hybrid_engine())
    assert engine.model.groups[2].parts[0].shape == (3, 64)
    assert Route(engine, hybrid_engine())


def test_the_beginning_is_fixed():
    """Other majors keep it, so that both ends can always say which versions met."""
    for message in MESSAGES.values():
        assert encode(message)[:11] == b"\x95\xa7kvferry\x01\x00"


@pytest.mark.parametrize("name", MESSAGES)
def test_later_minors_may_add_to_everything(name):
    envelope = unpacked(MESSAGES[name])
    envelope[2] = 9
    envelope[4]["new"] = {"nested": [1, {"deeper": b"\x00"}], "text": "x", "none": None}
    for part in ("blocks", "slots"):
        for entry in envelope[4].get(part, ()):
            if isinstance(entry, dict):
                entry["new"] = [2.5]
            else:
                entry.append("new")
    if "model" in envelope[4]:
        envelope[4]["model"]["new"] = envelope[4]["model"]["groups"][0]["new"] = True
    envelope.append("more")
    assert decode(msgspec.msgpack.encode(envelope)) == MESSAGES[name]


def test_earlier_minors_may_leave_out_what_has_a_default():
    envelope = unpacked(make_engine())
    kept = ("engine_id", "model", "tokens_per_block", "layout")
    envelope[4] = {field: envelope[4][field] for field in kept}
    assert decode(msgspec.msgpack.encode(envelope)) == make_engine()
    envelope = unpacked(TransferRequest("r", [[1], [2]], (0, 4)))
    del envelope[4]["first_tokens"]
    assert decode(msgspec.msgpack.encode(envelope)).first_tokens == (0, 0)


@pytest.mark.parametrize("major", [0, 2, 127])
def test_another_major_is_refused_naming_both(major):
    data = msgspec.msgpack.encode(["kvferry", major, 7, {"all": "else"}, "may", "differ"])
    with pytest.raises(ValueError, match=rf"version {major}\.7, .*reads 1\.x and writes 1\.0"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x95",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x95\xa7kvferrz\x01\x00\xa6engine\x80",
        b"\x94\xa7kvferry\x01\x00\xa6engine",
        b"\x95\xa7kvferry\xcc\x80\x00\xa6engine\x80",
        msgspec.msgpack.encode({"kvferry": 1}),
        b"\x00" * 1000,
    ],
    ids=label,
)
def test_other_bytes_are_no_message(data):
    with pytest.raises(ValueError, match="not a kvferry message"):
        decode(data)


def test_the_kind_is_checked():
    with pytest.raises(ValueError, match=r"expected an EngineSpec, .* a TransferRequest"):
        decode(encode(REQUEST), EngineSpec)
    with pytest.raises(ValueError, match="kind 'lease' is none of engine rank request"):
        decode(msgspec.msgpack.encode(["kvferry", 1, 0, "lease", {}]))


@pytest.mark.parametrize("kind", [ModelSpec, str, "engine", 5, hybrid_engine()], ids=label)
def test_a_kind_that_is_none_is_a_type_error(kind):
    with pytest.raises(TypeError, match="EngineSpec, RankDescription, TransferRequest"):
        decode(encode(REQUEST), kind)


@pytest.mark.parametrize("message", [None, 5, b"", hybrid_model(), {}], ids=label)
def test_only_messages_are_encoded(message):
    with pytest.raises(TypeError, match="TransferRequest"):
        encode(message)


@pytest.mark.parametrize("data", [None, "text", 5, [1]], ids=label)
def test_only_bytes_are_decoded(data):
    with pytest.raises(TypeError):
        decode(data)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_refused(name):
    data = encode(MESSAGES[name])
    for end in range(len(data)):
        with pytest.raises(ValueError, match="kvferry message"):
            decode(data[:end])


@pytest.mark.parametrize("name", MESSAGES)
def test_what_follows_a_message_is_refused(name):
    with pytest.raises(ValueError, match="1 bytes follow its end"):
        decode(encode(MESSAGES[name]) + b"\xc0")


# Bytes that stand in the place of a body; each names what it is.
HOSTILE = {
    "array of 2^32 - 1": (b"\xdd\xff\xff\xff\xff", "array of 4294967295"),
    "array of 65535": (b"\xdc\xff\xff", "array of 65535"),
    "map of 2^32 - 1": (b"\xdf\xff\xff\xff\xff", "map of 4294967295"),
    "binary of 2^32 - 1": (b"\xc6\xff\xff\xff\xff", "binary of 4294967295"),
    "string of 2^32 - 1": (b"\xdb\xff\xff\xff\xff", "4294967295 bytes .* longer than 4096"),
    "string one too long": (b"\xda\x10\x01" + b"a" * 4097, "longer than 4096"),
    "array of arrays": (b"\x91" * 1000 + b"\x90", "more than 16 levels"),
    "map of maps": (b"\x81\xa1a" * 1000 + b"\x80", "more than 16 levels"),
    "million of nothing": (b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 1_000_000, "262144 values"),
    "reserved byte": (b"\xc1", "0xc1"),
    "timestamp": (b"\xd6\xff\x00\x00\x00\x00", "0xd6"),
    "extension": (b"\xc7\x01\x05\x00", "0xc7"),
    "number as key": (b"\x81\x01\x02", "no string"),
    "array as key": (b"\x81\x90\x02", "no string"),
    "key twice": (b"\x82\xa4rank\x00\xa4rank\x01", "given twice: b'rank'"),
    "key in bad UTF-8": (b"\x81\xa2\xff\xfe\x02", "not a valid"),
    "nothing": (b"\xc0", "Expected `object`"),
    "array": (b"\x90", "Expected `object`"),
    "number": (b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", "Expected `object`"),
    "text": (b"\xa4text", "Expected `object`"),
    "empty map": (b"\x80", "missing required field"),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bodies_are_refused(name, what):
    data, why = HOSTILE[what]
    kind = bytes([0xA0 + len(name)]) + name.encode()
    with pytest.raises(ValueError, match=why) as caught:
        decode(b"\x95\xa7kvferry\x01\x00" + kind + data)
    assert type(caught.value) is ValueError
    assert len(str(caught.value)) < 500


ENGINE_FAULTS = {
    "engine_id": [None, 5, b"a", []],
    "model": [None, [], {}, {"groups": []}, {"groups": [{}]}, {"groups": [{"type": "other"}]}],
    "tokens_per_block": [0, -1, None, "4", 1.0, True, [4], [4, 4, 4, 4], 2**64 - 1],
    "layout": ["", "XYZ", 5, ["BNHC"], "B" * 4096],
    "tp_size": [0, -1, 3.0, "2", 2**14 + 1, 2**63, 2**64 - 1],
    "pp_size": [0, 3, 2**64 - 1],
    "cp_size": [0, 7, 2**64 - 1],
    "cp_interleave": [0, -(2**63), 2**64 - 1],
    "pp_layers": [[], [[0, 1]], [[0, 2**64 - 1]], [[1, 2, 3]], 5, [["0", "5"]]],
    "head_ranges": [[], [[0, 4]], 5, [[[[[[]]]]]], [{"a": 1}] * 2, [b"ab", b"cd"], [None]],
    "null_block_id": ["0", 1.5, [0], {}],
    "physical_blocks_per_block": [0, -1, [1], 2**64 - 1],
    "num_blocks": [0, -1, [1, 2], 2**64 - 1, "many"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in ENGINE_FAULTS.items() for value in values],
    ids=label,
)
def test_engines_are_checked_as_if_made_here(field, value):
    with pytest.raises(ValueError, match="not a valid EngineSpec") as caught:
        decode(with_body("engine", **{field: value}))
    # A size that contradicts another field may be blamed on either.
    assert field in str(caught.value) or field.endswith("_size") or field in ("model", "layout")


REQUEST_FAULTS = {
    "request_id": [None, 5, b"r"],
    "blocks": [
        None,
        [[1, 2], [3]],
        [["<i4"]],
        [["<i4", "text"]],
        [["<f8", b"\x00" * 8]],
        [["O", b"\x00" * 8]],
        [[">i4", b"\x00" * 8]],
        [["<i4", b"\x00" * 7], ["<i4", b""]],
        [["<i4", b""]],
        [["<i4", b""]] * 3,
        [["<i4", b""]] * 1025,
        b"\x00" * 8,
    ],
    "tokens": [None, [], [0], [0, 1, 2], [5, 4], [-1, 4], [0, 2**63], [0.0, 4], ["0", 4], 5],
    "first_tokens": [None, [0], [0, 0, 0], [-1, 0], [0, 2**63], [0, 1.5], 5, [0] * 1025],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in REQUEST_FAULTS.items() for value in values],
    ids=label,
)
def test_requests_are_checked_as_if_made_here(field, value):
    with pytest.raises(ValueError, match=f"not a valid TransferRequest.*{field}"):
        decode(with_body("request", **{field: value}))


RANK_FAULTS = {
    "engine_id": [None, 5],
    "rank": [None, "0", 1.5],
    "slots": [None, 5, [1], [{}], [[]], {"name": "layers.0"}],
}
SLOT_FAULTS = {
    "name": [None, 5],
    "address": [None, 1.5, "0"],
    "sizes": [None, [1.5], [1], [1] * 65, "abcd"],
    "strides": [None, ["1"], [1], [1] * 65, {}],
    "item_bytes": [None, "2"],
    "device": [None, [1], [1, 0, 0], "cpu"],
    "writable": [None, 1, "yes"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in RANK_FAULTS.items() for value in values],
    ids=label,
)
def test_descriptions_are_checked(field, value):
    with pytest.raises(ValueError, match=f"not a valid RankDescription.*{field}"):
        decode(with_body("rank", **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in SLOT_FAULTS.items() for value in values],
    ids=label,
)
def test_descriptions_of_tensors_are_checked(field, value):
    slot = unpacked(DESCRIPTION)[4]["slots"][0] | {field: value}
    with pytest.raises(ValueError, match=r"not a valid RankDescription.*(slots|strides)"):
        decode(with_body("rank", slots=[slot]))


@pytest.mark.parametrize(
    "fields",
    [
        {"address": 2**64 - 1},
        {"address": -1},
        {"sizes": [2**62, 4, 2, 8]},
        {"sizes": [-1, 4, 2, 8]},
        {"strides": [0, 32, 16, 2]},
        {"strides": [-(2**63), 32, 16, 2]},
        {"item_bytes": 1},
        {"name": "layers.7"},
    ],
    ids=label,
)
def test_where_a_description_is_used_its_geometry_is_checked(fields):
    """That needs the engine, so it is the route's part, as for a description made here."""
    slot = unpacked(DESCRIPTION)[4]["slots"][0] | fields
    description = decode(with_body("rank", slots=[slot]), RankDescription)
    plan = Route(make_engine(), make_engine("target")).plan(0, [[1]], [[2]], tokens=(0, 4))
    target = source_cache(make_engine("target")).describe()
    assert len(plan.descriptors(decode(encode(DESCRIPTION)), target))
    with pytest.raises(ValueError, match=r"layers\.[07]|address"):
        plan.descriptors(description, target)


def test_a_model_with_many_groups_is_refused_before_it_is_built():
    model = unpacked(make_engine())[4]["model"]
    group = model["groups"][0]

    def message(groups, **fields):
        return with_body("engine", model={"groups": groups}, **fields)

    with pytest.raises(ValueError, match=r"length <= 1024 - at `\$\.model\.groups`"):
        decode(message([group | {"layers": [layer]} for layer in range(1025)]))
    with pytest.raises(ValueError, match=r"length <= 4096 - at `\$\.model\.groups\[.+\]\.layers`"):
        decode(message([group | {"layers": list(range(4097))}]))
    with pytest.raises(ValueError, match="more than 8192"):
        decode(message([group | {"layers": list(range(g, 6000, 3))} for g in range(3)]))
    groups = [group | {"layers": [layer]} for layer in range(100)]
    with pytest.raises(ValueError, match=r"16384 \* 1 ranks .* 1638400, more than 1048576"):
        decode(message(groups, tp_size=1 << 14))
    with pytest.raises(ValueError, match=r"2 \* 16384 ranks .* 3276800, more than 1048576"):
        decode(message(groups, cp_size=1 << 14))


def test_bounds_hold_for_what_is_encoded():
    """A message that no peer would take is refused by its maker."""
    big = ModelSpec(tuple(AttentionGroup((layer,), 1, 4) for layer in range(1025)))
    with pytest.raises(ValueError, match="length <= 1024"):
        encode(make_engine(model=big))
    with pytest.raises(ValueError, match="longer than 4096"):
        encode(make_engine("a" * 5000))
    with pytest.raises(ValueError, match="not a valid EngineSpec"):
        encode(make_engine(null_block_id=2**64))
    with pytest.raises(ValueError, match="not a valid TransferRequest"):
        encode(TransferRequest("\ud800", [[1]], (0, 4)))
    with pytest.raises(ValueError, match="not a valid RankDescription"):
        encode(msgspec.structs.replace(DESCRIPTION, slots=(5,)))
    with pytest.raises(ValueError, match="not a valid RankDescription"):
        encode(msgspec.structs.replace(DESCRIPTION, rank=object()))


def test_the_largest_messages_are_taken():
    lists = np.arange(wire.MAX_IDS_PER_GROUP) + 2**40
    assert decode(encode(TransferRequest("r", [lists], (0, 4)))).blocks[0][-1] == lists[-1]
    with pytest.raises(ValueError, match=r"exceeds 67108864"):
        encode(TransferRequest("r", [lists, lists], (0, 4)))
    slot = msgspec.structs.replace(
        DESCRIPTION.slots[0], sizes=(1,) * 7, strides=(1,) * 7, name="layers.8000.state.something"
    )
    rank = RankDescription("a", 0, (slot,) * wire.MAX_SLOTS)
    assert decode(encode(rank)) == rank


def test_hostile_messages_take_bounded_memory():
    """A process of its own, whose peak is that of these messages: the largest amplifications."""
    code = """
import resource
from kvferry import wire
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
head = b"\\x95\\xa7kvferry\\x01\\x00"
values = wire.MAX_VALUES - 100
def array(count, item): return b"\\xdd" + count.to_bytes(4, "big") + item * count
bodies = [
    b"\\xa6engine\\x81\\xabhead_ranges" + array(values, b"\\x90"),
    b"\\xa6engine\\x81\\xabhead_ranges" + array(values // 3, b"\\x81\\xa1a\\x90"),
    b"\\xa6engine\\x81\\xa6layout" + array(values, b"\\xa8abcdefgh"),
    b"\\xa4rank\\x81\\xa5slots" + array(values, b"\\x80"),
    b"\\xa4rank\\x81\\xa5slots\\x91\\x82\\xa5sizes" + array(values, b"\\xcf" + b"\\xff" * 8),
    b"\\xa7request\\x81\\xacfirst_tokens" + array(values, b"\\xcf" + b"\\x7f" * 8),
    b"\\xa7request" + b"\\xdd\\x00\\x3f\\xff\\xff" * 14 + b"\\xc0" * (1 << 22),
]
for body in [*bodies, b"\\xa6engine" + array(1 << 26, b"\\xc0")]:
    before = peak()
    try: wire.decode(head + body)
    except ValueError as error: assert len(str(error)) < 500, error
    else: raise SystemExit("taken")
    if len(body) < 1 << 24: assert peak() - before < 64 << 10, (body[:20], peak() - before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_65536_ids_take_less_than_a_millisecond():
    rng = np.random.default_rng(0)
    for ids in (rng.permutation(65536), rng.permutation(65536) + 2**40):
        request = TransferRequest("r1", [ids], tokens=(0, 1 << 20))
        data = encode(request)
        for function, argument in ((encode, request), (decode, data)):
            best = min(_seconds(function, argument) for _ in range(20))
            assert best < 1e-3


def _seconds(function, argument):
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def test_ids_travel_packed():
    ids = np.arange(65536)
    assert len(encode(TransferRequest("r", [ids], (0, 1)))) < 4 * 65536 + 100
    assert len(encode(TransferRequest("r", [ids + 2**31], (0, 1)))) < 8 * 65536 + 100


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        ([], np.int64),
        ([0, 5, 2**31 - 1, -(2**31)], np.int64),
        ([2**31], np.int64),
        ([-(2**31) - 1], np.int64),
        ([2**63 - 1, -(2**63)], np.int64),
        ([2**63, 2**64 - 1, 0], np.uint64),
        ((1, 2), np.int64),
        (range(5, 0, -2), np.int64),
        (np.arange(4, dtype=np.uint8), np.int64),
        (np.arange(4, dtype=np.uint64), np.int64),
        (np.arange(8, dtype=">i4")[::-2], np.int64),
    ],
    ids=label,
)
def test_ids_keep_their_values(ids, dtype):
    request = TransferRequest("r", [ids], (0, 4))
    for blocks in (request.blocks, decode(encode(request)).blocks):
        assert blocks[0].dtype == dtype
        assert blocks[0].tolist() == list(ids)
        assert blocks[0].flags.c_contiguous and blocks[0].flags.aligned
        assert not blocks[0].flags.writeable


@pytest.mark.parametrize(
    "ids",
    [
        None,
        5,
        "12",
        b"12",
        [1.0],
        [None],
        [[1, 2]],
        [[1], [2, 3]],
        ["1"],
        [True],
        [2**64],
        [-1, 2**63],
        np.zeros((2, 2), int),
        np.zeros(3),
        range(2**40),
        range(2**70),
        {1, 2},
    ],
    ids=label,
)
def test_what_is_no_list_of_ids_is_refused(ids):
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        TransferRequest("r", [[1], ids], (0, 4))


def test_an_endless_iterable_ends():
    with pytest.raises(ValueError, match="first_tokens has more than 1024"):
        TransferRequest("r", [[1]], (0, 4), count())


@pytest.mark.parametrize("blocks", [None, 5, "ab", b"ab", {0: [1]}], ids=label)
def test_blocks_must_be_lists(blocks):
    with pytest.raises(ValueError, match="blocks"):
        TransferRequest("r", blocks, (0, 4))


def test_requests_keep_what_they_were_given():
    """Neither a list that its owner goes on using nor the received bytes are shared."""
    ids = np.array([7, 3])
    request = TransferRequest("r", [ids], (0, 4))
    data = bytearray(encode(request))
    received = decode(data)
    ids[:] = 0
    data[:] = bytes(len(data))
    assert request.blocks[0].tolist() == received.blocks[0].tolist() == [7, 3]
    assert request == received and hash(request) == hash(received)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "r2"},
        {"blocks": ([7, 3], range(5))},
        {"blocks": ([7, 4], range(4))},
        {"tokens": (5, 41)},
        {"first_tokens": (0, 0)},
    ],
    ids=label,
)
def test_requests_that_differ_are_unequal(fields):
    other = TransferRequest(**(msgspec.structs.asdict(REQUEST) | fields))
    assert other != REQUEST and REQUEST != 5
    assert decode(encode(other)) == other


def test_a_received_request_is_planned_as_it_is():
    source, target = make_engine(), make_engine("target", tokens=8)
    request = decode(encode(TransferRequest("r", [[3, 9, 4]], (0, 10))))
    plan = Route(source, target).plan(
        0, request.blocks, [[5, 2]], request.tokens, source_first_token=request.first_tokens
    )
    assert plan.num_bytes == 10 * 2 * 2 * 4 * 2


def test_a_far_null_block_travels():
    """An engine may count in unsigned numbers and mean the last of them by no block."""
    null = 2**64 - 1
    source = decode(encode(make_engine(null_block_id=null)))
    request = decode(encode(TransferRequest("r", [[null, 9]], (4, 8))))
    plan = Route(source, make_engine("target")).plan(0, request.blocks, [[1, 2]], request.tokens)
    assert plan.num_bytes


# Fingerprints.


def test_fingerprints_do_not_change():
    """Peers of different versions compare them; a change needs a new major wire version."""
    conv = StatePart("conv", (3, 64), "bfloat16", shard_axis=1)
    model = ModelSpec(
        (
            AttentionGroup((0, 3), 4, 8, v_head_dim=6, sliding_window=128),
            LatentGroup((1,), 576, "float8_e4m3fn"),
            StateGroup((2, 0), (conv,)),
        )
    )
    assert fingerprint(model) == "f6c97687a4deb821f42fd80d9f89fefdf37cb23cfa379557860073cf57376de3"


@pytest.mark.parametrize("value", [None, 5, REQUEST, "model"], ids=label)
def test_only_engines_and_models_have_fingerprints(value):
    with pytest.raises(TypeError, match="ModelSpec"):
        fingerprint(value)


def test_what_does_not_matter_is_left_out():
    model = attention_model(layers=4, heads=2)
    engines = [
        make_engine("a", model),
        make_engine("b", model, 16, "KBHND", tp_size=2, pp_size=2, null_block_id=0, num_blocks=9),
        make_engine("c", model, 8, "BNHD", cp_size=2, physical_blocks_per_block=2),
        make_engine("d", model.regroup([[3, 0], [2], [1]]), (4, 8, 16), head_ranges=((0, 2),)),
        make_engine("e", ModelSpec(model.groups, name="other")),
        make_engine("f", attention_model(layers=4, heads=2, v_head_dim=4)),
    ]
    assert len({fingerprint(engine) for engine in engines}) == 1
    assert fingerprint(engines[0]) == fingerprint(model)


small = st.sampled_from([1, 2])
dtypes = st.sampled_from(["float16", "bfloat16"])
parts = st.builds(
    StatePart,
    name=st.sampled_from(["a", "b"]),
    shape=st.tuples(st.just(2), st.sampled_from([2, 4])),
    dtype=dtypes,
    shard_axis=st.sampled_from([None, None, 0, 1]),
)
parts |= parts.filter(lambda part: part.shard_axis is not None).flatmap(
    lambda part: st.sampled_from(
        [msgspec.structs.replace(part, shard_units=units) for units in (1, 2)]
    )
)
# Few values a field, so that two models that are drawn are often alike.
kinds = st.one_of(
    st.builds(
        AttentionGroup,
        st.just((0,)),
        num_kv_heads=small,
        head_dim=st.just(2),
        dtype=dtypes,
        v_head_dim=st.sampled_from([None, 2, 4]),
        sliding_window=st.sampled_from([-1, -1, 4, 8]),
        tokens_per_slot=st.sampled_from([1, 1, 2]),
    ),
    st.builds(
        LatentGroup,
        st.just((0,)),
        latent_dim=st.sampled_from([2, 4]),
        dtype=dtypes,
        tokens_per_slot=small,
    ),
    st.builds(
        StateGroup,
        st.just((0,)),
        st.lists(parts, min_size=1, max_size=2, unique_by=lambda part: part.name).map(tuple),
    ),
)


@st.composite
def models(draw, base=None):
    """Draw a model of one to four layers; near `base`, where that is given."""
    by_layer = dict(base) if base else {}
    for _ in range(draw(st.integers(0 if base else 1, 1 if base else 4))):
        kind = draw(kinds)
        key = (draw(st.integers(0, 3)), isinstance(kind, StateGroup))
        by_layer[key] = kind
        if base and len(by_layer) > 1 and draw(st.integers(0, 5)) == 0:
            del by_layer[key]
    return by_layer


@st.composite
def engines(draw, name, by_layer):
    """Group the layers of one geometry, and cut them into ranks and blocks, in any way."""
    grouped = {}
    for (layer, _), kind in draw(st.permutations(sorted(by_layer.items(), key=str))):
        key = (repr(kind), draw(st.integers(0, 1)))
        grouped.setdefault(key, (kind, []))[1].append(layer)
    groups = tuple(
        msgspec.structs.replace(kind, layers=tuple(layers)) for kind, layers in grouped.values()
    )
    return EngineSpec(
        name,
        ModelSpec(groups, name=draw(st.text(max_size=2))),
        tokens_per_block=draw(st.sampled_from([4, 8, 12])),
        layout=draw(st.sampled_from(["BNHC", "BHNC"])),
        tp_size=draw(st.sampled_from([1, 2, 3])),
        null_block_id=draw(st.sampled_from([None, 0])),
    )


@st.composite
def engine_pairs(draw):
    by_layer = draw(models())
    other = draw(models(base=by_layer))
    return draw(engines("a", by_layer)), draw(engines("b", other))


@given(engine_pairs())
def test_fingerprints_are_equal_where_a_route_can_be_made(pair):
    source, target = pair
    try:
        Route(source, target)
        fits = True
    except IncompatibleEnginesError:
        fits = False
    assert (fingerprint(source) == fingerprint(target)) == fits
    for engine in pair:
        assert fingerprint(decode(encode(engine))) == fingerprint(engine)
        assert decode(encode(engine)) == engine


def test_errors_of_the_specs_are_errors_of_the_message():
    with pytest.raises(LayoutError):
        make_engine(layout="XYZ")
    with pytest.raises(ValueError, match="XYZ") as caught:
        decode(with_body("engine", layout="XYZ"))
    assert not isinstance(caught.value, KVFerryError)


def test_the_bounds_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    stated = dict(re.findall(r"^\| `(MAX_\w+)`.* \| ([\d,]+(?: MiB)?) \|$", text, re.MULTILINE))
    assert {*stated} == {name for name in wire.__all__ if name.startswith("MAX_")}
    for name, number in stated.items():
        unit = 1 << 20 if number.endswith(" MiB") else 1
        assert int(number.split()[0].replace(",", "")) * unit == getattr(wire, name)
