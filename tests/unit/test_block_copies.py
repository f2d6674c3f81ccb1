"""`copy_blocks`: whole blocks between tensors of any two layouts, and what it refuses."""

from __future__ import annotations

import array
from itertools import count

import numpy as np
import pytest
import torch
from block_models import copy_by_hand, refused, strided, tensor_shapes
from engines import UNTOUCHED, is_untouched, label
from producers import Producer
from threads import assert_other_threads_run

from kvferry import Layout
from kvferry.copy import copy_blocks
from kvferry.errors import BlockRangeError, LayoutError, OverlapError

LAYERS, TOKENS, HEADS, DIM = 2, 3, 5, 4
SOURCE_BLOCKS, TARGET_BLOCKS = 6, 7
SOURCE_IDS, TARGET_IDS = [4, 0, 4, 5], [1, 6, 3, 2]
LAYOUTS = [
    "KBNHD",
    "KBHND",
    "BKNHD",
    "BHNC",
    "BNHC",
    "BNHD",
    "BHND",
    "BLKNHD",
    "LBHNC",
    "BKLNHD",
    "LBNHD",
    "HKNBD",
]


def tensors(layout, blocks, *, layers=LAYERS, dim=DIM, item=np.uint16, **changes):
    """Tensors of all layers, of numbers that count up."""
    sizes = {"L": layers, "B": blocks, "N": TOKENS, "H": HEADS, **changes}
    return [
        np.arange(start, start + np.prod(shape)).astype(item).reshape(shape)
        for start, shape in zip(count(1, 1000), tensor_shapes(layout, dim, dim, **sizes))
    ]


def sources(layout, **changes):
    return tensors(layout, SOURCE_BLOCKS, **changes)


def targets(layout, **changes):
    """Tensors that are all `UNTOUCHED` bytes, so that every write shows."""
    result = tensors(layout, TARGET_BLOCKS, **changes)
    for tensor in result:
        tensor.view(np.uint8).fill(UNTOUCHED)
    return result


def expected_of(source, target, source_layout, target_layout, source_ids, target_ids):
    """Copy by hand into copies of the target's tensors."""
    expected = [tensor.copy() for tensor in target]
    copy_by_hand(
        source, expected, source_ids, target_ids,
        source_layout=source_layout, target_layout=target_layout,
        key_dim=DIM, layers=LAYERS, tokens=TOKENS, heads=HEADS,
    )  # fmt: skip
    return expected


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_every_layout_becomes_every_other(source_layout, target_layout):
    source, target = sources(source_layout), targets(target_layout)
    before = [tensor.copy() for tensor in source]
    expected = expected_of(source, target, source_layout, target_layout, SOURCE_IDS, TARGET_IDS)
    result = copy_blocks(
        source,
        target,
        SOURCE_IDS,
        TARGET_IDS,
        source_layout=source_layout,
        target_layout=target_layout,
    )
    assert result is None
    assert_same(target, expected)
    assert_same(source, before)


def test_a_block_by_hand():
    """Two tokens of two heads of one element, from key and value planes to packed content."""
    keys_and_values = np.array([[[[1], [2]], [[3], [4]]], [[[5], [6]], [[7], [8]]]], np.uint8)
    source = keys_and_values[:, np.newaxis]  # [plane, block, token, head, dim]
    target = np.zeros((3, 2, 2, 2), np.uint8)  # [block, head, token, content]
    copy_blocks(source, target, [0], [2], source_layout="NHD", target_layout="BHNC")
    assert target[2].tolist() == [[[1, 5], [3, 7]], [[2, 6], [4, 8]]]
    assert not target[:2].any()


@pytest.mark.parametrize(
    ("source_layout", "target_layout"),
    [("NHD", "HND"), (Layout("NHD"), Layout("BHNC")), ("KBNHD", Layout("KBHND"))],
)
def test_layouts_are_strings_shorthands_or_objects(source_layout, target_layout):
    source, target = sources("KBNHD"), targets(Layout(target_layout))
    expected = expected_of(
        source, target, "KBNHD", str(Layout(target_layout)), SOURCE_IDS, TARGET_IDS
    )
    copy_blocks(
        source,
        target,
        SOURCE_IDS,
        TARGET_IDS,
        source_layout=source_layout,
        target_layout=target_layout,
    )
    assert_same(target, expected)


@pytest.mark.parametrize("given", [lambda one: one, lambda one: [one], lambda one: (one,)])
def test_one_layer_is_a_tensor_or_a_sequence_of_one(given):
    (source,), (target,) = sources("BNHC", layers=1), targets("BHNC", layers=1)
    copy_blocks(given(source), given(target), [4], [1], source_layout="BNHC", target_layout="BHNC")
    np.testing.assert_array_equal(target[1], source[4].transpose(1, 0, 2))
    assert is_untouched(np.delete(target, 1, axis=0))


def test_latent_blocks():
    single = [np.arange(4 * 3 * 5, dtype=np.uint16).reshape(4, 3, 5) + 100 * i for i in range(2)]
    joined = np.zeros((6, 2, 3, 5), np.uint16)
    copy_blocks(single, joined, [3, 1], [5, 0], source_layout="BND", target_layout="BLND")
    np.testing.assert_array_equal(joined[[5, 0]], np.stack(single, axis=1)[[3, 1]])
    assert not joined[1:5].any()
    back = [np.zeros((4, 3, 5), np.uint16) for _ in range(2)]
    copy_blocks(joined, back, [5], [2], source_layout="BLND", target_layout="BND")
    assert_same([layer[2] for layer in back], [layer[3] for layer in single])
    assert not any(layer[[0, 1, 3]].any() for layer in back)


def test_keys_and_values_of_unequal_width():
    packed = np.arange(4 * 3 * 2 * 8, dtype=np.uint16).reshape(4, 3, 2, 8)
    keys, values = np.zeros((5, 2, 3, 6), np.uint16), np.zeros((5, 2, 3, 2), np.uint16)
    copy_blocks(packed, [keys, values], [3], [1], source_layout="BNHC", target_layout="BHND")
    np.testing.assert_array_equal(keys[1], packed[3, ..., :6].transpose(1, 0, 2))
    np.testing.assert_array_equal(values[1], packed[3, ..., 6:].transpose(1, 0, 2))
    back = np.zeros_like(packed)
    copy_blocks([keys, values], back, [1], [0], source_layout="BHND", target_layout="BNHC")
    np.testing.assert_array_equal(back[0], packed[3])
    assert not back[1:].any()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_items_are_bytes_of_any_type(dtype):
    source = strided((2, 4, 3, 2, 5), item_bytes=dtype.itemsize)
    target = strided((4, 2, 3, 10), item_bytes=dtype.itemsize, seed=1)
    expected = target.array.copy()
    expected[3] = np.concatenate(list(source.array[:, 1].transpose(0, 2, 1, 3)), axis=-1)
    copy_blocks(
        source.tensor(dtype),
        target.tensor(dtype),
        [1],
        [3],
        source_layout="NHD",
        target_layout="BHNC",
    )
    np.testing.assert_array_equal(target.array, expected)


def test_torch_meets_numpy_and_types_of_one_size():
    (source,) = sources("BNHC", layers=1)
    target = torch.zeros(TARGET_BLOCKS, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16)
    copy_blocks(source, target, [4, 0], [1, 6], source_layout="BNHC", target_layout="BNHC")
    bits = target.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits[[1, 6]], source[[4, 0]])
    assert not bits[[0, 2, 3, 4, 5]].any()
    back = np.zeros_like(source)
    copy_blocks(target, back, [1], [2], source_layout="BNHC", target_layout="BNHC")
    np.testing.assert_array_equal(back[2], source[4])


STRIDES = {
    "padded blocks": {"padding": [7, 0, 0, 0]},
    "padded everywhere": {"padding": [1, 2, 3, 0]},
    "heads outside tokens": {"memory_order": [0, 2, 1, 3]},
    "blocks innermost": {"memory_order": [1, 2, 3, 0]},
    "blocks between": {"memory_order": [1, 0, 2, 3], "padding": [0, 0, 5, 0]},
    "elements apart": {"innermost_step": 3},
    "all the other way round": {"memory_order": [3, 2, 1, 0], "padding": [0, 1, 1, 0]},
}


@pytest.mark.parametrize("source_strides", STRIDES.values(), ids=STRIDES.keys())
@pytest.mark.parametrize("target_strides", STRIDES.values(), ids=STRIDES.keys())
def test_tensors_of_any_strides(source_strides, target_strides):
    source = strided((4, 3, 2, 6), **source_strides)
    target = strided((5, 2, 3, 6), **target_strides, seed=1)
    unwritten = strided((5, 2, 3, 6), **target_strides, seed=1)
    unwritten.array[[4, 0]] = source.array[[2, 1]].transpose(0, 2, 1, 3)
    copy_blocks(
        source.array, target.array, [2, 1], [4, 0], source_layout="BNHC", target_layout="BHNC"
    )
    np.testing.assert_array_equal(target.memory, unwritten.memory)


def test_a_transposed_view_is_named_by_its_dimensions():
    """The letters name the dimensions of the tensor as handed over, its strides say the rest."""
    (source,) = sources("BNHC", layers=1)
    head_major = np.full((TARGET_BLOCKS, HEADS, TOKENS, 2 * DIM), 0xEEEE, np.uint16)
    view = torch.from_numpy(head_major.view(np.int16)).transpose(1, 2)
    copy_blocks(source, view, [4], [1], source_layout="BNHC", target_layout="BNHC")
    np.testing.assert_array_equal(head_major[1], source[4].transpose(1, 0, 2))
    assert is_untouched(np.delete(head_major, 1, axis=0))


def test_the_stride_of_an_axis_of_size_one_is_not_looked_at():
    source = np.arange(4 * 3 * 6, dtype=np.uint16).reshape(4, 3, 1, 6)
    wild = np.lib.stride_tricks.as_strided(source, source.shape, (36, 12, 0, 2))
    target = np.zeros_like(source)
    written = np.lib.stride_tricks.as_strided(target, source.shape, (36, 12, 2, 2))
    copy_blocks(wild, written, [3], [0], source_layout="BNHC", target_layout="BNHC")
    np.testing.assert_array_equal(target[0], source[3])
    assert not target[1:].any()


AS_IDS = {
    "list": list,
    "tuple": tuple,
    "range": lambda ids: range(ids[0], ids[0] + len(ids)),
    "list of numpy": lambda ids: [np.int32(i) for i in ids],
    **{
        kind: lambda ids, kind=kind: np.array(ids, kind)
        for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4")
    },
    "backwards": lambda ids: np.array(ids[::-1])[::-1],
    "every other": lambda ids: np.array([[i, 99] for i in ids])[:, 0],
    "torch int64": torch.tensor,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch strided": lambda ids: torch.tensor([[i, 99] for i in ids])[:, 0],
    "array": lambda ids: array.array("l", ids),
}


@pytest.mark.parametrize("as_ids", AS_IDS.values(), ids=AS_IDS.keys())
def test_ids_come_in_any_integer_container(as_ids):
    (source,), (target,) = sources("BNHC", layers=1), targets("BNHC", layers=1)
    copy_blocks(
        source, target, as_ids([2, 3, 4]), as_ids([4, 5, 6]),
        source_layout="BNHC", target_layout="BNHC",
    )  # fmt: skip
    np.testing.assert_array_equal(target[[4, 5, 6]], source[[2, 3, 4]])
    assert is_untouched(target[:4])


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([], np.int64), torch.tensor([])])
def test_no_ids_do_nothing(empty):
    (source,), (target,) = sources("BNHC", layers=1), targets("BHNC", layers=1)
    copy_blocks(source, target, empty, empty, source_layout="BNHC", target_layout="BHNC")
    assert is_untouched(target)
    copy_blocks(source, target[:0], empty, [], source_layout="BNHC", target_layout="BHNC")
    # Within one tensor too.
    copy_blocks(target, target, empty, empty, source_layout="BHNC", target_layout="BHNC")
    assert is_untouched(target)


def layered(**changes):
    """Source and target tensors of two layers, a call on them, and all the memory there is."""
    source, target = sources("BNHC"), targets("BNHC")

    def call(source=source, target=target, source_ids=(4, 0), target_ids=(1, 6), **more):
        options = {"source_layout": "BNHC", "target_layout": "BNHC", **more}
        copy_blocks(source, target, source_ids, target_ids, **options)

    return source, target, call


@pytest.mark.parametrize("target_ids", [[1, 1], [1, 6, 1], np.array([6, 6])])
def test_a_target_block_is_named_once(target_ids):
    _, target, call = layered()
    with refused(OverlapError, *target, match=rf"\b{target_ids[-1]}\b"):
        call(source_ids=[4, 0, 2][: len(target_ids)], target_ids=target_ids)


def test_a_source_block_may_be_read_for_many():
    source, target, call = layered()
    call(source_ids=[3] * TARGET_BLOCKS, target_ids=range(TARGET_BLOCKS))
    for read, written in zip(source, target, strict=True):
        assert (written == read[3]).all()


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "id", "limit"),
    [
        ([4, 99], [1, 6], 99, SOURCE_BLOCKS),
        ([4, 0], [99, 6], 99, TARGET_BLOCKS),
        ([4, SOURCE_BLOCKS], [1, 6], SOURCE_BLOCKS, SOURCE_BLOCKS),
        ([4, 0], [1, TARGET_BLOCKS], TARGET_BLOCKS, TARGET_BLOCKS),
        ([4, -1], [1, 6], -1, SOURCE_BLOCKS),
        ([4, 0], [-1, 6], -1, TARGET_BLOCKS),
        ([2**40, 0], [1, 6], 2**40, SOURCE_BLOCKS),
        ([4, 0], [1, 2**63 - 1], 2**63 - 1, TARGET_BLOCKS),
        ([4, 0], [1, -(2**63)], -(2**63), TARGET_BLOCKS),
    ],
)
def test_blocks_that_do_not_exist(source_ids, target_ids, id, limit):  # noqa: A002
    _, target, call = layered()
    with refused(BlockRangeError, *target, match=rf"{id}\b.*\b{limit}\b"):
        call(source_ids=source_ids, target_ids=target_ids)


@pytest.mark.parametrize("huge", [2**63, 2**64, 2**200, -(2**200)], ids=label)
def test_ids_beyond_64_bits_do_not_exist(huge):
    _, target, call = layered()
    for ids in ({"source_ids": [4, huge]}, {"target_ids": [huge, 1]}):
        with refused(BlockRangeError, *target, match=str(huge)):
            call(**ids)
    with refused(BlockRangeError, *target):
        call(source_ids=np.array([4, 2**63], np.uint64))


@pytest.mark.parametrize("wrong", [None, 5, "01", [1.0, 2.0], [None, 1], ["0", "1"], {1, 2}, [[1]]])
def test_what_is_no_list_of_ids_is_refused(wrong):
    _, target, call = layered()
    for ids in ({"source_ids": wrong}, {"target_ids": wrong}):
        with refused((TypeError, ValueError), *target):
            call(**ids)


def test_the_lists_have_one_length():
    _, target, call = layered()
    for source_ids, target_ids in (([4, 0], [1]), ([4], [1, 6]), ([], [1]), ([4], [])):
        one, other = len(source_ids), len(target_ids)
        with refused(BlockRangeError, *target, match=rf"\b{one}\b.*\b{other}\b|{other}.*{one}"):
            call(source_ids=source_ids, target_ids=target_ids)


def test_blocks_move_inside_one_tensor():
    (memory,) = sources("BNHC", layers=1)
    expected = memory.copy()
    expected[[5, 2]] = memory[[1, 3]]
    options = {"source_layout": "BNHC", "target_layout": "BNHC"}
    copy_blocks(memory, memory, [1, 3], [5, 2], **options)
    np.testing.assert_array_equal(memory, expected)
    for source_ids, target_ids in (
        ([1], [1]),
        ([1, 2], [2, 1]),
        ([1, 2], [2, 3]),
        ([3, 4], [2, 3]),
        (range(6), range(6)),
    ):
        with refused(OverlapError, memory):
            copy_blocks(memory, memory, source_ids, target_ids, **options)
        # Another view of the memory, and another object over it, are the same tensor.
        with refused(OverlapError, memory):
            copy_blocks(torch.from_numpy(memory.view(np.int16)), memory[:], source_ids, target_ids,
                        **options)  # fmt: skip


def test_blocks_are_laid_out_anew_inside_one_memory():
    (memory,) = sources("BNHC", layers=1)
    head_major = memory.reshape(SOURCE_BLOCKS, HEADS, TOKENS, 2 * DIM)
    expected = head_major.copy()
    expected[2] = memory[4].transpose(1, 0, 2)
    options = {"source_layout": "BNHC", "target_layout": "BHNC"}
    copy_blocks(memory, head_major, [4], [2], **options)
    np.testing.assert_array_equal(head_major, expected)
    with refused(OverlapError, memory):
        copy_blocks(memory, head_major, [4], [4], **options)


def test_a_layer_that_is_read_and_written_as_another():
    (first, shared), (_, last) = sources("BNHC"), targets("BNHC")
    options = {"source_layout": "BNHC", "target_layout": "BNHC"}
    with refused(OverlapError, first, shared, last):
        copy_blocks([first, shared], [shared, last], [4, 1], [0, 4], **options)
    before = shared.copy()
    copy_blocks([first, shared], [shared, last], [4, 1], [0, 3], **options)
    np.testing.assert_array_equal(shared[[0, 3]], first[[4, 1]])
    np.testing.assert_array_equal(last[[0, 3]], before[[4, 1]])
    np.testing.assert_array_equal(shared[[1, 2, 4, 5]], before[[1, 2, 4, 5]])


def test_bytes_decide_where_views_overlap():
    block = TOKENS * HEADS * 2 * DIM
    options = {"source_layout": "BNHC", "target_layout": "BNHC"}
    flat = np.arange(8 * block, dtype=np.uint16)
    shape = (-1, TOKENS, HEADS, 2 * DIM)
    whole, shifted = flat.reshape(shape), flat[block // 2 :][: 7 * block].reshape(shape)
    # Block 3 of the shifted view is the second half of block 3 and the first half of block 4.
    for source_id in (3, 4):
        with refused(OverlapError, flat):
            copy_blocks(whole, shifted, [source_id], [3], **options)
    expected = flat.copy()
    expected[3 * block + block // 2 :][:block] = whole[5].reshape(-1)
    copy_blocks(whole, shifted, [5], [3], **options)
    np.testing.assert_array_equal(flat, expected)
    # Two layers' targets half a block apart, each with an id once.
    for target_ids in ([3], [1, 2]):
        with refused(OverlapError, flat):
            copy_blocks(sources("BNHC"), [whole, shifted], range(len(target_ids)), target_ids,
                        **options)  # fmt: skip
    with refused(OverlapError, flat):
        copy_blocks(sources("BNHC"), [whole, whole], [4], [1], **options)


def test_layers_may_interleave_in_one_memory():
    pool = np.full((TARGET_BLOCKS, TOKENS, HEADS, LAYERS, 2 * DIM), 0xEEEE, np.uint16)
    source = sources("BNHC")
    views = [pool[:, :, :, layer] for layer in range(LAYERS)]
    copy_blocks(source, views, [4, 0], [1, 2], source_layout="BNHC", target_layout="BNHC")
    assert_same([view[[1, 2]] for view in views], [layer[[4, 0]] for layer in source])
    assert is_untouched(pool[[0, 3, 4, 5, 6]])


def test_blocks_that_overlap_their_neighbours_are_no_target():
    memory = np.full(5000, 0xEEEE, np.uint16)
    shape = (TARGET_BLOCKS, TOKENS, HEADS, 2 * DIM)
    block = TOKENS * HEADS * 2 * DIM
    rows = (HEADS * 2 * DIM * 2, 2 * DIM * 2, 2)
    (source,) = sources("BNHC", layers=1)
    for steps in ((2 * (block - 1), *rows), (0, *rows), (64, *rows)):
        target = np.lib.stride_tricks.as_strided(memory, shape, steps)
        with refused((LayoutError, OverlapError), memory):
            copy_blocks(source, target, [4, 0], [1, 2], source_layout="BNHC", target_layout="BNHC")


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("reverse", [False, True])
def test_strides_are_positive(axis, reverse):
    (good,) = sources("BNHC", layers=1)
    if reverse:
        bad = np.flip(good.copy(), axis)
    else:
        steps = [0 if i == axis else step for i, step in enumerate(good.strides)]
        bad = np.lib.stride_tricks.as_strided(good.copy(), good.shape, steps)
    options = {"source_layout": "BNHC", "target_layout": "BNHC"}
    with refused(LayoutError, good, bad):
        copy_blocks(good, bad, [4], [1], **options)
    with refused(LayoutError, good, bad):
        copy_blocks(bad, good, [4], [1], **options)


@pytest.mark.parametrize("source_layout", ["BNHC", "BLKNHD", "BNHD"])
@pytest.mark.parametrize("target_layout", ["HND", "BHNC", "LBNHD"])
@pytest.mark.parametrize(
    "change", [{"N": TOKENS + 1}, {"H": HEADS - 1}, {"dim": 2 * DIM}, {"item": np.uint8}]
)
def test_what_both_sides_hold_must_agree(source_layout, target_layout, change):
    for source, target in (
        (sources(source_layout), targets(Layout(target_layout), **change)),
        (sources(source_layout, **change), targets(Layout(target_layout))),
    ):
        with refused(LayoutError, *target):
            copy_blocks(
                source, target, [4], [1], source_layout=source_layout, target_layout=target_layout
            )


@pytest.mark.parametrize("source_layout", ["BNHC", "BLKNHD", "BNHD", "LBNHD"])
@pytest.mark.parametrize("target_layout", ["HND", "BKLNHD", "BHND"])
@pytest.mark.parametrize("layers", [1, 3])
def test_both_sides_have_as_many_layers(source_layout, target_layout, layers):
    source, target = sources(source_layout), targets(Layout(target_layout), layers=layers)
    with refused(LayoutError, *target):
        copy_blocks(
            source, target, [4], [1], source_layout=source_layout, target_layout=target_layout
        )


def test_tensors_must_fit_their_layout():
    source, target, call = layered()
    planes = np.zeros((3, SOURCE_BLOCKS, TOKENS, HEADS, DIM), np.uint16)
    odd = np.zeros((SOURCE_BLOCKS, TOKENS, HEADS, 2 * DIM + 1), np.uint16)
    latent = np.zeros((SOURCE_BLOCKS, TOKENS, 2 * DIM), np.uint16)
    for bad in (
        {"source": np.stack(source)},  # all layers in one tensor is another layout
        {"source": [layer[..., 0] for layer in source]},
        {"source": [source[0], source[1][..., 0]]},
        {"source": [source[0], source[1][..., :-2]]},
        {"source": [source[0], source[1].view(np.uint8)]},
        {"source": [*sources("KBNHD", layers=2)]},
        {"source": planes, "target": target[0], "source_layout": "NHD"},
        {"source": odd, "target": targets("KBNHD", layers=1)[0], "target_layout": "NHD"},
        {"source": sources("BNHD")[:1], "target": target[:1], "source_layout": "BNHD"},
        {"source": sources("BNHD")[:3], "source_layout": "BNHD"},
        {"source": sources("BNHD")[0], "target": target[:1], "source_layout": "BNHD"},
        {"source": latent, "target": target[0], "source_layout": "BND"},
        {"source": sources("BLKNHD") * 2, "source_layout": "BLKNHD"},
    ):
        with refused(LayoutError, *target):
            call(**bad)
    with refused((LayoutError, ValueError), *target):
        call(source=[], target=[])
    for nothing in (None, 5, "tensor", b"bytes", [None, None], [*source[:1], 5], object()):
        with refused((TypeError, LayoutError), *target):
            call(source=nothing)
        with refused((TypeError, LayoutError), *target):
            call(target=nothing)


@pytest.mark.parametrize("layout", ["KBNHD", "BKHND", "HKNBD", "BKLNHD"])
@pytest.mark.parametrize("planes", [1, 3])
def test_there_is_a_key_plane_and_a_value_plane(layout, planes):
    """As many planes on both sides, so that nothing else is wrong."""

    def taken(tensors, times):
        axis = layout.index("K")
        return [tensor.take([*range(2), 0][:times], axis) for tensor in tensors]

    good = sources(layout)
    bad, target = taken(good, planes), taken(targets(layout), planes)
    options = {"source_layout": layout, "target_layout": layout}
    with refused(LayoutError, *target, match=rf"{planes} planes? along K, not 2"):
        copy_blocks(bad, target, [4], [1], **options)
    with refused(LayoutError, *target, match=rf"{planes} planes? along K, not 2"):
        copy_blocks(good, target, [4], [1], **options)
    whole = targets(layout)
    with refused(LayoutError, *whole, match=rf"{planes} planes? along K, not 2"):
        copy_blocks(bad, whole, [4], [1], **options)


@pytest.mark.parametrize("unknown", ["", "XYZ", "BNHE", "BBNHD", "BHD", "BKNHC", "DBNH", "bnhc"])
def test_unknown_layouts_are_refused(unknown):
    _, target, call = layered()
    for side in ("source_layout", "target_layout"):
        with refused(LayoutError, *target):
            call(**{side: unknown})


@pytest.mark.parametrize("wrong", [None, 5, b"BNHC", ["BNHC"]], ids=label)
def test_a_layout_is_a_string(wrong):
    _, target, call = layered()
    for side in ("source_layout", "target_layout"):
        with refused((TypeError, ValueError), *target):
            call(**{side: wrong})


def test_read_only_memory_is_a_source_only():
    """The fault lies in the last layer, so that a check that comes late is seen."""
    source, target, call = layered()
    source[1].flags.writeable = target[1].flags.writeable = False
    with refused(LayoutError, *target, match="read-only"):
        call()
    target[1].flags.writeable = True
    call()
    assert_same([layer[[1, 6]] for layer in target], [layer[[4, 0]] for layer in source])


def test_faults_of_the_last_layer_change_nothing_in_the_first():
    source, target, call = layered()
    for bad in (
        {"source": [source[0], source[1][:4]]},
        {"target": [target[0], target[1][:6]]},
    ):
        with refused(BlockRangeError, *target):
            call(**bad)
    with refused(OverlapError, *target):
        call(target=[target[0], target[0]])
    with refused(OverlapError, *source, *target):
        call(target=[target[0], source[0]], target_ids=[2, 4])


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", float("nan"), 2**63, 2**200, [1]], ids=label)
def test_threads_are_checked(threads):
    _, target, call = layered()
    with refused((TypeError, ValueError), *target, match="threads"):
        call(threads=threads)


def test_zero_threads_are_a_value_error():
    _, target, call = layered()
    with refused(ValueError, *target, match="threads"):
        call(threads=0)


@pytest.mark.parametrize("target_layout", ["BNHC", "HND"])
def test_any_number_of_threads_gives_the_same_bytes(target_layout):
    """24 MiB: more than is copied on one thread."""
    source = np.random.default_rng(0).integers(0, 1 << 16, (192, 64, 4, 256), np.uint16)
    shape = {"BNHC": (200, 64, 4, 256), "HND": (2, 200, 4, 64, 128)}[target_layout]
    sources_ids, target_ids = np.random.default_rng(1).permutation(192), range(4, 196)
    results = []
    for threads in (1, 2, 1000, None):
        target = np.full(shape, 0xEEEE, np.uint16)
        copy_blocks(
            source, target, sources_ids, target_ids,
            source_layout="BNHC", target_layout=target_layout, threads=threads,
        )  # fmt: skip
        results.append(target)
    expected = np.full(shape, 0xEEEE, np.uint16)
    if target_layout == "BNHC":
        expected[4:196] = source[sources_ids]
    else:
        halves = np.split(source[sources_ids], 2, axis=-1)
        expected[:, 4:196] = np.stack(halves).swapaxes(2, 3)
    assert_same(results, [expected] * 4)


def test_other_threads_run_while_bytes_move():
    source, target = (np.ones((1024, 64, 4, 256), np.uint16) for _ in range(2))
    ids = np.random.default_rng(0).permutation(1024)
    options = {"source_layout": "BNHC", "target_layout": "BNHC", "threads": 1}
    assert_other_threads_run(lambda: copy_blocks(source, target, ids, ids, **options))


@pytest.mark.parametrize("stream", [None, 0, 1, 0x7F00_0000_0000])
def test_host_memory_needs_no_stream_and_may_have_one(stream):
    _, expected, call = layered()
    call()
    _, target, call = layered()
    call(stream=stream)
    assert_same(target, expected)


@pytest.mark.parametrize("stream", ["0", 1.5, [0]])
def test_a_stream_is_an_integer(stream):
    _, target, call = layered()
    with refused(ValueError, *target, match="stream="):
        call(stream=stream)


def test_tensors_are_given_back_once():
    shape, strides = (10, 4, 2, 8), (64, 16, 8, 1)
    options = {"source_layout": "BNHC", "target_layout": "BNHC"}
    for error, ids in ((None, [1]), (BlockRangeError, [10]), (BlockRangeError, [1, 2])):
        source, target = Producer(shape, strides), Producer(shape, strides)
        source.memory[:] = b"\7" * len(source.memory)
        if error is None:
            copy_blocks(source, target, ids, [2], **options)
            written = bytes(target.memory)
            assert written.count(7) == 128 and set(written[256:384]) == {7}
        else:
            with pytest.raises(error):
                copy_blocks(source, target, ids, [2], **options)
            assert not any(target.memory)
        assert source.exported >= 1 and target.exported >= 1
        assert (source.deleted, target.deleted) == (source.exported, target.exported)


def test_many_blocks_that_interleave_inside_one_tensor():
    """Told apart by their ids, since their bytes are too many to compare."""
    cache = np.arange(500 * 500 * 16, dtype=np.uint32).reshape(500, 500, 16, 1)
    expected = cache.copy()
    expected[:, :, 8:] = cache[:, :, :8]
    arguments = {"source_layout": "NHBD", "target_layout": "NHBD"}
    copy_blocks(cache, cache, range(8), range(8, 16), **arguments)
    np.testing.assert_array_equal(cache, expected)
    with refused(OverlapError, cache, match="block id 7 of one tensor is both read and written"):
        copy_blocks(cache, cache, range(8), range(7, 15), **arguments)


def test_layers_are_bounded_over_all_tensors():
    empty = [np.zeros((40000, 1, 0, 1, 1), np.uint8)] * 2
    layouts = {"source_layout": "LBNHD", "target_layout": "LBNHD"}
    with pytest.raises(LayoutError, match="80000 layers, more than 65536"):
        copy_blocks(empty, empty, [0], [0], **layouts)
