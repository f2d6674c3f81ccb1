"""Registering tensors: what a cache accepts, what it refuses, and what it keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from engines import (
    attention_model,
    counting_tensors,
    label,
    make_engine,
    source_cache,
    target_cache,
    tokens_of,
    untouched_tensors,
)

from kvferry import AttentionGroup, KVCache, LatentGroup, ModelSpec, Route, StateGroup, StatePart
from kvferry.errors import BlockRangeError, LayoutError

ENGINE = make_engine("source", attention_model(layers=2))
SHAPE = (10, 4, 2, 8)


def one_layer(layout="BNHC", heads=2, dim=4, tokens=4, **fields):
    return make_engine("source", attention_model(heads=heads, dim=dim, **fields), tokens, layout)


def halves(shape=SHAPE):
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "given",
    [
        list,
        tuple,
        lambda tensors: {"layers.1": tensors[1], "layers.0": tensors[0]},
        lambda tensors: OrderedDict(zip(("layers.0", "layers.1"), tensors, strict=True)),
        lambda tensors: MappingProxyType(dict(zip(("layers.0", "layers.1"), tensors, strict=True))),
    ],
    ids=["list", "tuple", "dict", "OrderedDict", "MappingProxyType"],
)
def test_tensors_come_in_order_or_by_name(library, given):
    make = halves if library == "numpy" else (lambda: torch.zeros(SHAPE, dtype=torch.float16))
    tensors = [make(), make()]
    cache = KVCache(ENGINE, 0, given(tensors))
    addresses = [
        tensor.ctypes.data if library == "numpy" else tensor.data_ptr() for tensor in tensors
    ]
    assert [slot.address for slot in cache.describe().slots] == addresses
    assert (cache.engine, cache.rank) == (ENGINE, 0)
    assert repr(cache) == "KVCache(engine='source', rank=0, tensors=2)"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], LayoutError, "expected 2 tensors.* got 0"),
        ([halves()], LayoutError, "expected 2 tensors.* got 1"),
        ([halves()] * 3, LayoutError, "expected 2 tensors.* got 3"),
        ({}, LayoutError, r"layers\.0"),
        ({"layers.0": halves()}, LayoutError, r"layers\.1"),
        (
            {"layers.0": halves(), "layers.1": halves(), "layers.2": halves()},
            BlockRangeError,
            r"layers\.2",
        ),
        (
            {0: halves(), 1: halves()},
            BlockRangeError,
            r'rank 0 of engine "source" has no tensor slot 0, but such as "layers\.0"$',
        ),
        (halves((2, *SHAPE)), TypeError, r"sequence.*pass \[tensor\]"),
        (torch.zeros(2, *SHAPE), TypeError, r"sequence.*pass \[tensor\]"),
        (None, TypeError, "sequence.*NoneType'>$"),
        (5, TypeError, "sequence"),
        ({"a", "b"}, TypeError, "sequence"),
        ("ab", TypeError, "DLPack"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_number_and_names_of_tensors_are_checked(given, error, words):
    with pytest.raises(error, match=words):
        KVCache(ENGINE, 0, given)


def test_one_tensor_is_none_of_several_tensors():
    with pytest.raises(LayoutError, match="expected 1 tensor, one a slot, got 2"):
        KVCache(one_layer(), 0, [halves()] * 2)


@pytest.mark.parametrize("rank", [None, -1, 1, 1.0, "0", 2**63, 2**200, float("nan")], ids=label)
def test_the_rank_is_checked(rank):
    with pytest.raises(ValueError, match="rank"):
        KVCache(ENGINE, rank, [halves(), halves()])


@pytest.mark.parametrize("engine", [None, 5, "source", ENGINE.model])
def test_the_engine_is_checked(engine):
    with pytest.raises(TypeError, match="EngineSpec"):
        KVCache(engine, 0, [halves(), halves()])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((10, 4, 2), "3 dimensions.* has 4"),
        ((10, 4, 2, 8, 1), "5 dimensions.* has 4"),
        ((), "0 dimensions.* has 4"),
        ((10, 5, 2, 8), 'size 5 along N of layout "BNHC", expected 4'),
        ((10, 4, 1, 8), "size 1 along H .*expected 2"),
        ((10, 4, 0, 8), "size 0 along H .*expected 2"),
        ((10, 2, 4, 8), "size 2 along N .*expected 4"),
        ((10, 4, 2, 4), "size 4 along C .*expected 8"),
        ((10, 4, 2, 16), "size 16 along C .*expected 8"),
    ],
)
def test_dimensions_and_sizes_are_checked(shape, words):
    with pytest.raises(LayoutError, match=words) as caught:
        KVCache(one_layer(), 0, [halves(shape)])
    assert isinstance(caught.value, ValueError) and "layers.0" in str(caught.value)


@pytest.mark.parametrize("blocks", [0, 1, 10])
def test_any_number_of_blocks_is_accepted_where_none_is_declared(blocks):
    (slot,) = KVCache(one_layer(), 0, [halves((blocks, 4, 2, 8))]).describe().slots
    assert slot.sizes == (blocks, 4, 2, 8)


def test_declared_blocks_must_be_there():
    engine = make_engine("source", attention_model(), num_blocks=10)
    for blocks in (10, 11):
        KVCache(engine, 0, [halves((blocks, 4, 2, 8))])
    with pytest.raises(LayoutError, match=r"9 blocks.* 10"):
        KVCache(engine, 0, [halves((9, 4, 2, 8))])
    physical = make_engine("source", attention_model(), num_blocks=10, physical_blocks_per_block=2)
    KVCache(physical, 0, [halves((20, 2, 2, 8))])
    with pytest.raises(LayoutError, match=r"19 blocks.* 20"):
        KVCache(physical, 0, [halves((19, 2, 2, 8))])


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "complex128"])
def test_the_item_size_is_checked(dtype):
    with pytest.raises(LayoutError, match="items of"):
        KVCache(one_layer(), 0, [np.zeros(SHAPE, dtype)])


@pytest.mark.parametrize("dtype", ["float16", "int16", "uint16"])
def test_items_of_one_size_are_alike(dtype):
    KVCache(one_layer(), 0, [np.zeros(SHAPE, dtype)])


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("bfloat16", torch.bfloat16),
        ("bfloat16", torch.uint16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("float8_e4m3fn", torch.uint8),
        ("float8_e5m2", torch.float8_e5m2),
        ("float8_e8m0fnu", torch.float8_e8m0fnu),
    ],
    ids=str,
)
def test_narrow_torch_types_are_moved_as_bytes(declared, given):
    source, target = (
        make_engine(name, attention_model(dtype=declared), 4, "BNHC")
        for name in ("source", "target")
    )
    raw = torch.arange(10 * 4 * 2 * 8, dtype=torch.int32).to(torch.uint8)
    if given.itemsize == 2:
        raw = torch.stack([raw, raw.flip(0)], 1)
    read = raw.contiguous().view(torch.uint8).flatten().view(given).reshape(SHAPE)
    written = torch.zeros(SHAPE, dtype=given)
    plan = Route(source, target).plan(0, [[3, 1]], [[0, 9]], tokens=(0, 8))
    plan.copy(KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    as_bytes = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731
    assert torch.equal(as_bytes(written[[0, 9]]), as_bytes(read[[3, 1]]))
    assert not as_bytes(written[1:9]).any()


def test_four_bit_elements_are_registered_as_pairs():
    source, target = (one_layer(dim=8, dtype="float4_e2m1fn_x2") for _ in range(2))
    (read,), (written,) = counting_tensors(source), untouched_tensors(target)
    assert read.shape == (10, 4, 2, 8) and read.dtype == np.uint8  # 8 + 8 elements in 8 bytes
    plan = Route(source, target).plan(0, [[3]], [[5]], tokens=(0, 4))
    plan.copy(KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    np.testing.assert_array_equal(written[5], read[3])
    pairs = torch.from_numpy(read).view(torch.float4_e2m1fn_x2)
    assert KVCache(source, 0, [pairs]).describe().slots[0].item_bytes == 1
    with pytest.raises(LayoutError, match="size 16 along C"):
        KVCache(source, 0, [np.zeros((10, 4, 2, 16), np.uint8)])


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (lambda memory: memory[::-1], "-128 bytes along B"),
        (lambda memory: memory[:, ::-1], "-32 bytes along N"),
        (lambda memory: memory[..., ::-1], "-2 bytes along C"),
        (lambda memory: np.broadcast_to(memory[:1], SHAPE), "0 bytes along B"),
        (lambda memory: np.broadcast_to(memory[:, :, :1], SHAPE), "0 bytes along H"),
        (lambda memory: np.broadcast_to(memory[..., :1], SHAPE), "0 bytes along C"),
        (lambda memory: halves((10, 2, 4, 8)).transpose(0, 2, 1, 3), "memory order"),
        (lambda memory: halves((4, 10, 2, 8)).transpose(1, 0, 2, 3), "memory order"),
        (lambda memory: halves((10, 4, 2, 16))[..., ::2], "contiguous"),
        (lambda memory: halves((10, 4, 8, 2)).transpose(0, 1, 3, 2), "contiguous"),
    ],
)
def test_strides_against_memory_order_are_refused(view, words):
    with pytest.raises(LayoutError, match=words):
        KVCache(one_layer(), 0, [view(halves())])


def test_torch_expansions_are_refused():
    expanded = torch.zeros(1, 4, 2, 8, dtype=torch.float16).expand(*SHAPE)
    with pytest.raises(LayoutError, match="0 bytes along B"):
        KVCache(one_layer(), 0, [expanded])


@pytest.mark.parametrize(
    "view",
    [
        lambda: halves((20, 4, 2, 8))[::2],
        lambda: halves((10, 6, 2, 8))[:, :4],
        lambda: halves((10, 4, 5, 8))[:, :, 1:3],
        lambda: halves((10, 4, 2, 24))[..., 8:16],
        lambda: halves((1, 4, 2, 8))[::-1],
        lambda: halves((2, 4, 10, 8))[:1].transpose(0, 1, 2, 3)[:, :, ::5],
    ],
)
def test_padding_is_fine(view):
    source, target = one_layer(), one_layer("BHNC")
    read = view()
    read[...] = np.arange(read.size, dtype=np.float16).reshape(read.shape)
    (written,) = untouched_tensors(target)
    plan = Route(source, target).plan(0, [[0]], [[7]], tokens=(0, 4))
    plan.copy(KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    np.testing.assert_array_equal(written[7].transpose(1, 0, 2).view(np.float16), read[0])


def test_axes_name_the_dimensions_as_handed_over():
    engine = one_layer("BHNC")
    memory = np.arange(10 * 2 * 4 * 8, dtype=np.uint16).reshape(10, 2, 4, 8)
    for axes in ("BHNC", "BNHC", "HBNC", "CNHB"):
        view = np.einsum(f"BHNC->{axes}", memory)
        (slot,) = KVCache(engine, 0, [view], axes=axes).describe().slots
        assert (slot.sizes, slot.strides) == (memory.shape, memory.strides)
        assert slot.address == memory.ctypes.data


@pytest.mark.parametrize(
    "axes", ["", "BHN", "BHNCC", "BHNX", "bhnc", "BHNCL", "BBNC", "BNHD", "NHD"]
)
def test_axes_name_each_axis_once(axes):
    with pytest.raises(LayoutError, match="axes"):
        KVCache(one_layer(), 0, [halves()], axes=axes)


@pytest.mark.parametrize("axes", [5, b"BNHC", (), ("BNHC", "BNHC"), (5,), float("nan")], ids=label)
def test_axes_are_a_string_or_one_a_group(axes):
    with pytest.raises(ValueError, match="axes"):
        KVCache(one_layer(), 0, [halves()], axes=axes)


def test_axes_are_given_once_or_a_group():
    model = ModelSpec(
        (
            AttentionGroup((0,), num_kv_heads=2, head_dim=4, dtype="float16"),
            LatentGroup((1,), latent_dim=6, dtype="float16"),
            StateGroup((2,), (StatePart("s", (3, 5), "float16"),)),
        )
    )
    engine = make_engine("a", model, layout="BHNC")
    attention, latent, state = halves((10, 2, 4, 8)), halves((10, 4, 6)), halves((9, 3, 5))
    KVCache(engine, 0, [attention, latent, state])
    views = [attention.transpose(0, 2, 1, 3), latent.transpose(1, 0, 2), state]
    cache = KVCache(engine, 0, views, axes=("BNHC", "NBD", "BS"))
    assert [slot.sizes for slot in cache.describe().slots] == [(10, 2, 4, 8), (10, 4, 6), (9, 3, 5)]
    with pytest.raises(LayoutError, match='"BS"'):
        KVCache(engine, 0, views, axes=("BNHC", "NBD", "SB"))


def test_a_strided_state_keeps_its_order():
    model = ModelSpec((StateGroup((0,), (StatePart("s", (3, 5), "float16"),)),))
    engine = make_engine("a", model)
    KVCache(engine, 0, [halves((9, 3, 10))[..., :5]])
    with pytest.raises(LayoutError, match="memory order"):
        KVCache(engine, 0, [halves((3, 9, 5)).transpose(1, 0, 2)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(SHAPE, dtype=torch.float16, requires_grad=True), "grad"),
        (lambda: torch.zeros(SHAPE, dtype=torch.float16, device="meta"), "meta"),
        (lambda: torch.zeros(SHAPE, dtype=torch.float16).to_sparse(), "strided"),
        (lambda: np.zeros(SHAPE, ">f2"), "byte order"),
        (lambda: np.zeros(SHAPE, object), "cannot be exported"),
        (lambda: np.zeros(SHAPE, "M8[s]"), "cannot be exported"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_librarys_reason(make, words):
    with pytest.raises(LayoutError, match=rf"layers\.0.*{words}"):
        KVCache(one_layer(), 0, [make()])


def test_detached_and_inference_tensors_are_accepted():
    KVCache(one_layer(), 0, [torch.zeros(SHAPE, dtype=torch.float16, requires_grad=True).detach()])
    with torch.inference_mode():
        KVCache(one_layer(), 0, [torch.zeros(SHAPE, dtype=torch.float16)])


def test_read_only_memory_is_a_source_and_never_a_target():
    source, target = one_layer(), make_engine("target", attention_model())
    memory = np.arange(np.prod(SHAPE), dtype=np.uint16).reshape(SHAPE)
    memory.flags.writeable = False
    before = memory.copy()
    fixed = KVCache(source, 0, [memory])
    assert fixed.describe().slots[0].writable is False
    (written,) = untouched_tensors(target)
    Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(
        fixed, KVCache(target, 0, [written])
    )
    np.testing.assert_array_equal(written[2], memory[1])
    backwards = Route(target, source).plan(0, [[1]], [[2]], tokens=(0, 4))
    for refused in (backwards.copy, backwards.descriptors):
        with pytest.raises(LayoutError, match="read-only"):
            refused(target_cache(target), fixed)
    with pytest.raises(LayoutError, match="read-only"):
        backwards.descriptors(target_cache(target).describe(), fixed.describe())
    np.testing.assert_array_equal(memory, before)


def test_read_only_tensors_of_groups_that_move_nothing_do_not_matter():
    group = {"num_kv_heads": 2, "head_dim": 4, "dtype": "float16"}
    model = ModelSpec((AttentionGroup((0,), **group), AttentionGroup((1,), **group)))
    source, target = make_engine("source", model), make_engine("target", model)
    tensors = untouched_tensors(target)
    tensors[0].flags.writeable = False
    plan = Route(source, target).plan(
        0, [[], [1]], [[], [2]], tokens=(0, 4), target_first_token=(4, 0)
    )
    plan.copy(source_cache(source), KVCache(target, 0, tensors))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_memory_stays_alive_as_long_as_its_cache(library):
    source, target = one_layer(), one_layer()
    (numbers,) = counting_tensors(source, blocks=2000)
    expected = numbers.copy()
    given = numbers if library == "numpy" else torch.from_numpy(numbers.astype(np.int16)).clone()
    alive = weakref.ref(given)
    cache = KVCache(source, 0, [given])
    del given, numbers
    gc.collect()
    assert library == "torch" or alive() is not None
    # Were the memory free, these would likely be put there.
    reused = [np.full(expected.shape, 0x5A5A, np.uint16) for _ in range(8)]
    (written,) = untouched_tensors(target, blocks=2000)
    plan = Route(source, target).plan(0, [range(2000)], [range(2000)], tokens=(0, 8000))
    plan.copy(cache, KVCache(target, 0, [written]))
    np.testing.assert_array_equal(written, expected)
    del cache, reused
    gc.collect()
    assert alive() is None


def test_nothing_is_copied():
    source, target = one_layer("NHD"), one_layer("HND")
    (read,), (written,) = counting_tensors(source), untouched_tensors(target)
    caches = (KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    read[:] = 7  # after the registration
    Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(*caches)
    assert (tokens_of(written, "KBHND", [2]) == 7).all()


def test_slots_may_alias_when_they_are_registered():
    memory = halves()
    cache = KVCache(ENGINE, 0, [memory, memory])
    first, second = cache.describe().slots
    assert first.address == second.address


def test_a_cache_cannot_be_pickled_by_accident():
    import pickle

    with pytest.raises(TypeError):
        pickle.dumps(source_cache(ENGINE))


def test_interrupts_while_tensors_are_read_are_not_swallowed():
    class Interrupted:
        @property
        def __dlpack_device__(self):
            raise KeyboardInterrupt

    class InterruptedMapping(dict):
        def __getitem__(self, name):
            raise KeyboardInterrupt

    engine = make_engine("source", attention_model())
    with pytest.raises(KeyboardInterrupt):
        KVCache(engine, 0, [Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        KVCache(engine, 0, InterruptedMapping({"layers.0": halves()}))


def test_read_only_tensors_of_layers_that_move_nothing_do_not_matter():
    source = make_engine("source", attention_model(layers=1))
    target = make_engine("target", attention_model(layers=2))
    route = Route(source, target, allow_missing_layers=True)
    tensors = untouched_tensors(target)
    tensors[1].flags.writeable = False
    plan = route.plan(0, [[1]], [[2]], tokens=(0, 4))
    plan.copy(source_cache(source), KVCache(target, 0, tensors))
    tensors[0].flags.writeable = False
    with pytest.raises(LayoutError, match=r"layers\.0.*read-only"):
        plan.copy(source_cache(source), KVCache(target, 0, tensors))
