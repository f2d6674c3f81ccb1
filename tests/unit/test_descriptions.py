"""Descriptions of a peer's tensors: what they say, and that no lie in them does harm."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from engines import attention_model, label, make_engine, rows, source_cache, target_cache

from kvferry import AttentionGroup, KVCache, LatentGroup, ModelSpec, RankDescription, Route
from kvferry.errors import BlockRangeError, LayoutError

MODEL = attention_model(layers=2)
SOURCE, TARGET = make_engine("source", MODEL), make_engine("target", MODEL)
replace = msgspec.structs.replace


def make_plan():
    return Route(SOURCE, TARGET).plan(0, [[3, 1]], [[2, 5]], tokens=(0, 8))


def with_slot(description, **fields):
    """Return the description with its first slot changed."""
    first, *others = description.slots
    return replace(description, slots=(replace(first, **fields), *others))


def test_a_description_says_where_everything_lies():
    model = ModelSpec(
        (
            AttentionGroup((0,), num_kv_heads=2, head_dim=4, dtype="float16"),
            LatentGroup((1,), latent_dim=6, dtype="float8_e4m3fn"),
        )
    )
    engine = make_engine("a", model, 4, "HND", tp_size=2)
    attention = np.zeros((2, 10, 1, 5, 4), np.float16)[
        :, :, :, :4
    ]  # a slot of padding in each block
    latent = np.zeros((9, 4, 6), np.uint8)
    latent.flags.writeable = False
    description = KVCache(engine, 1, [attention, latent]).describe()
    assert isinstance(description, RankDescription)
    assert (description.engine_id, description.rank) == ("a", 1)
    slots = engine.tensor_slots(1)
    assert [slot.name for slot in description.slots] == [slot.name for slot in slots]
    kv, mla = description.slots
    assert (kv.address, kv.item_bytes, kv.device, kv.writable) == (
        attention.ctypes.data,
        2,
        (1, 0),
        True,
    )
    assert (kv.sizes, kv.strides) == ((2, 10, 1, 4, 4), (400, 40, 0, 8, 2))
    assert (mla.address, mla.item_bytes, mla.device, mla.writable) == (
        latent.ctypes.data,
        1,
        (1, 0),
        False,
    )
    assert (mla.sizes, mla.strides) == ((9, 4, 6), (24, 6, 1))


def test_a_description_is_in_memory_order():
    engine = make_engine("a", attention_model(), 4, "BHNC")
    memory = np.zeros((10, 2, 4, 8), np.float16)
    (slot,) = KVCache(engine, 0, [memory.transpose(0, 2, 1, 3)], axes="BNHC").describe().slots
    assert (slot.sizes, slot.strides) == (memory.shape, memory.strides)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_a_description_survives_its_message(codec):
    caches = source_cache(SOURCE), target_cache(TARGET)
    received = [
        codec.decode(codec.encode(cache.describe()), type=RankDescription) for cache in caches
    ]
    assert received == [cache.describe() for cache in caches]
    plan = make_plan()
    expected = rows(plan.descriptors(*caches))
    assert expected == [
        (i, read * 128, i, write * 128, 128) for i in (0, 1) for read, write in ((3, 2), (1, 5))
    ]
    for source in (caches[0], received[0]):
        for target in (caches[1], received[1]):
            assert rows(plan.descriptors(source, target)) == expected
    assert plan.explain(*received).num_fragments == 4


def test_the_address_does_not_matter_to_descriptors():
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    expected = rows(plan.descriptors(source, target))
    moved = with_slot(source.describe(), address=2**47)
    assert rows(plan.descriptors(moved, target)) == expected


def test_a_peer_on_a_gpu_is_described_all_the_same():
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    on_gpu = with_slot(source.describe(), device=(2, 3))
    assert len(plan.descriptors(on_gpu, target)) == 4


def test_a_description_is_no_cache():
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    with pytest.raises(TypeError, match="KVCache"):
        plan.copy(source.describe(), target)
    with pytest.raises(TypeError, match="KVCache"):
        plan.copy(source, [target.describe()])


@pytest.mark.parametrize(
    "fields",
    [
        {"address": -1},
        {"address": 2**64 - 1},
        {"address": 2**64},
        {"sizes": ()},
        {"sizes": (10, 4, 2)},
        {"sizes": (10, 4, 2, 8, 1)},
        {"sizes": (-1, 4, 2, 8)},
        {"sizes": (-(2**63), 4, 2, 8)},
        {"sizes": (10, 4, 2, 9)},
        {"sizes": (10, 8, 1, 8)},
        {"sizes": (0, 4, 2, 8)},
        {"sizes": (1, 4, 2, 8)},
        {"sizes": (2**62, 4, 2, 8)},
        {"sizes": (2**63 - 1, 4, 2, 8)},
        {"sizes": (2**63, 4, 2, 8)},
        {"sizes": (2**200, 4, 2, 8)},
        {"strides": ()},
        {"strides": (128, 32, 16)},
        {"strides": (0, 32, 16, 2)},
        {"strides": (64, 32, 16, 2)},
        {"strides": (-128, 32, 16, 2)},
        {"strides": (128, 32, 16, 4)},
        {"strides": (128, 16, 64, 2)},
        {"strides": (2**62, 32, 16, 2)},
        {"strides": (2**63 - 1, 2**63 - 1, 2**63 - 1, 2)},
        {"strides": (2**63, 32, 16, 2)},
        {"strides": (-(2**200), 32, 16, 2)},
        {"item_bytes": 0},
        {"item_bytes": -2},
        {"item_bytes": 1},
        {"item_bytes": 2**63},
        {"item_bytes": 2**200},
        {"device": (2**31, 0)},
        {"device": (2**200, 0)},
    ],
    ids=label,
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_numbers_that_lie_are_value_errors(side, fields):
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    lie = with_slot((source if side == "source" else target).describe(), **fields)
    ends = (lie, target) if side == "source" else (source, lie)
    for read in (plan.descriptors, plan.explain):
        with pytest.raises(ValueError) as caught:  # noqa: PT011, checked below
            read(*ends)
        message = str(caught.value)
        assert any(word in message for word in ("layers.0", "block id", *fields)), message


@pytest.mark.parametrize(
    "fields",
    [
        {"address": None},
        {"address": 1.0},
        {"sizes": None},
        {"sizes": 5},
        {"sizes": (10.0, 4, 2, 8)},
        {"sizes": "abcd"},
        {"strides": None},
        {"item_bytes": "2"},
        {"device": None},
        {"device": (1,)},
        {"device": ("cpu", 0)},
        {"writable": None},
        {"writable": "yes"},
    ],
    ids=label,
)
def test_types_that_lie_are_refused(fields):
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    with pytest.raises((ValueError, TypeError)):
        plan.descriptors(with_slot(source.describe(), **fields), target)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_slots_is_checked(count):
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    description = source.describe()
    wrong = replace(description, slots=(*description.slots, description.slots[0])[:count])
    with pytest.raises(LayoutError, match=f"2 tensors, got {count}"):
        plan.descriptors(wrong, target)


def test_slots_in_another_order_are_refused():
    """Offsets count from a tensor, so two slots that change places would move wrong layers."""
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    description = source.describe()
    with pytest.raises(LayoutError, match=r"layers\.[01]"):
        plan.descriptors(replace(description, slots=description.slots[::-1]), target)


@pytest.mark.parametrize("slots", [None, 5, "ab", (1, 2), (None, None)], ids=label)
def test_slots_that_are_none_are_refused(slots):
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    with pytest.raises((ValueError, TypeError)):
        plan.descriptors(replace(source.describe(), slots=slots), target)


@pytest.mark.parametrize("rank", [1, -1, 2**63, 2**200, None, "0", 0.0], ids=label)
def test_the_rank_is_checked(rank):
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    with pytest.raises(ValueError, match="rank"):
        plan.descriptors(replace(source.describe(), rank=rank), target)


def test_the_engine_is_checked():
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    with pytest.raises(ValueError, match=r"'?\"?other\"?'?.*source"):
        plan.descriptors(replace(source.describe(), engine_id="other"), target)
    with pytest.raises(ValueError, match=r"target.*source"):
        plan.descriptors(target.describe(), source.describe())
    for wrong in (None, 5, "source", MODEL, [source.describe()]):
        with pytest.raises(TypeError, match="RankDescription"):
            plan.descriptors(wrong, target)


def test_a_read_only_peer_is_no_target():
    plan, source, target = make_plan(), source_cache(SOURCE), target_cache(TARGET)
    fixed = with_slot(target.describe(), writable=False)
    with pytest.raises(LayoutError, match=r"layers\.0.* read-only"):
        plan.descriptors(source, fixed)


def test_ids_are_checked_against_the_peers_tensors():
    plan = Route(SOURCE, TARGET).plan(0, [[3, 10]], [[2, 5]], tokens=(0, 8))
    source, target = source_cache(SOURCE), target_cache(TARGET)
    for end in (source, source.describe()):
        with pytest.raises(BlockRangeError, match=r"block id 10 of group 0 .*source.* \[0, 10\)"):
            plan.descriptors(end, target)
    assert rows(plan.descriptors(source_cache(SOURCE, blocks=11), target))[1][1] == 10 * 128


def test_a_description_of_a_rank_that_is_no_pair_gives_nothing():
    wide = make_engine("source", MODEL, tp_size=2)
    route = Route(wide, make_engine("target", MODEL, tp_size=2))
    plan = route.plan(1, [[1]], [[2]], tokens=(0, 4))
    target = target_cache(make_engine("target", MODEL, tp_size=2), 1)
    empty = plan.descriptors(source_cache(wide, 0).describe(), target)
    assert (len(empty), empty.total_bytes, empty.min_bytes, empty.mean_bytes) == (0, 0, 0, 0)
    assert rows(empty) == []
    assert empty.length.dtype == np.int64
