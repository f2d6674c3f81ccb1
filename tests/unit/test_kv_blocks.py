"""`copy_kv_blocks`: rows of dimension 0 between two dicts of tensors, layer by layer by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_models import refused, strided
from engines import is_untouched, label
from producers import Producer
from threads import assert_other_threads_run

from kvferry.copy import copy_kv_blocks
from kvferry.errors import BlockRangeError, LayoutError, OverlapError

SHAPE = (3, 2, 4)  # of a row: tokens, heads, head_dim
NAMES = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
SOURCE_ROWS, TARGET_ROWS = 6, 7


def make_sources(rows=SOURCE_ROWS, shape=SHAPE, item=np.uint16):
    size = rows * int(np.prod(shape))
    return {
        name: np.arange(1 + 500 * i, 1 + 500 * i + size).astype(item).reshape(rows, *shape)
        for i, name in enumerate(NAMES)
    }


def make_targets(rows=TARGET_ROWS, shape=SHAPE, names=NAMES):
    return {name: np.full((rows, *shape), 0xEEEE, np.uint16) for name in names}


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_rows_move_layer_by_layer(direction):
    source, target = make_sources(), make_targets()
    before = {name: tensor.copy() for name, tensor in source.items()}
    # The order of the names in a dict says nothing.
    target = dict(reversed(target.items()))
    result = copy_kv_blocks(source, target, [4, 0, 4, 5], [1, 6, 3, 2], direction)
    assert result is None
    for name in NAMES:
        np.testing.assert_array_equal(target[name][[1, 6, 3, 2]], source[name][[4, 0, 4, 5]])
        assert is_untouched(target[name][[0, 4, 5]])
        np.testing.assert_array_equal(source[name], before[name])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ids", [[], [1]])
@pytest.mark.parametrize(
    "direction", ["", "H2D", "d2d", "h2h", "h2d ", b"h2d", None, 0, ["h2d"]], ids=label
)
def test_there_are_two_directions(direction, ids, strict):
    target = make_targets()
    # `strict` has nothing to say here: the lists are equal.
    with refused(ValueError, *target.values(), match="direction"):
        copy_kv_blocks(make_sources(), target, ids, ids, direction, strict=strict)


def test_a_direction_is_checked_where_nothing_would_move():
    with pytest.raises(ValueError, match="direction"):
        copy_kv_blocks({}, {}, [], [], "sideways")
    with pytest.raises(ValueError, match="direction"):
        copy_kv_blocks(make_sources(), make_targets(), [1, 2], [1], "sideways")


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        ([], []),
        ([], [1]),
        ([1], []),
        ([1, 2], [1]),
        ([1], [1, 2]),
        (np.array([], np.int64), torch.tensor([])),
        ((1, 2, 3), range(2)),
    ],
    ids=label,
)
def test_empty_or_unequal_lists_do_nothing(source_ids, target_ids):
    target = make_targets()
    copy_kv_blocks(make_sources(), target, source_ids, target_ids, "h2d")
    assert all(map(is_untouched, target.values()))
    if len(source_ids) == len(target_ids):
        copy_kv_blocks(make_sources(), target, source_ids, target_ids, "h2d", strict=True)
    else:
        with pytest.raises(BlockRangeError, match=rf"\b{len(source_ids)}\b.*\b{len(target_ids)}\b"):
            copy_kv_blocks(make_sources(), target, source_ids, target_ids, "h2d", strict=True)
    assert all(map(is_untouched, target.values()))


def test_no_layers_do_nothing():
    target = make_targets()
    copy_kv_blocks({}, target, [1], [2], "d2h")
    copy_kv_blocks({}, {}, [1], [2], "d2h")
    assert all(map(is_untouched, target.values()))


def test_a_layer_that_the_target_lacks_is_named():
    """The last one, so that a check that comes late is seen."""
    target = make_targets(names=NAMES[:-1])
    with refused(BlockRangeError, *target.values(), match=r"model\.layers\.2\.attn"):
        copy_kv_blocks(make_sources(), target, [4], [1], "h2d")


def test_layers_that_only_the_target_has_are_left_alone():
    source, target = make_sources(), make_targets(names=(*NAMES, "model.layers.3.attn"))
    # One that could not be a target, too.
    target["model.layers.4.attn"] = np.full((1, 1), 0xEE, np.uint8)
    copy_kv_blocks(source, target, [4], [1], "h2d")
    for name in NAMES:
        np.testing.assert_array_equal(target[name][1], source[name][4])
    assert is_untouched(target["model.layers.3.attn"])
    assert is_untouched(target["model.layers.4.attn"])


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "row", "limit"),
    [
        ([4, SOURCE_ROWS], [1, 6], SOURCE_ROWS, SOURCE_ROWS),
        ([4, 0], [TARGET_ROWS, 6], TARGET_ROWS, TARGET_ROWS),
        ([-1, 0], [1, 6], -1, SOURCE_ROWS),
        ([4, 0], [1, -7], -7, TARGET_ROWS),
        ([2**40, 0], [1, 6], 2**40, SOURCE_ROWS),
        ([4, 0], [2**63 - 1, 6], 2**63 - 1, TARGET_ROWS),
        (np.array([4, -(2**63)]), [1, 6], -(2**63), SOURCE_ROWS),
    ],
    ids=label,
)
def test_rows_that_do_not_exist(source_ids, target_ids, row, limit):
    target = make_targets()
    with refused(BlockRangeError, *target.values(), match=rf"{row}\b.*\b{limit}\b"):
        copy_kv_blocks(make_sources(), target, source_ids, target_ids, "h2d")


@pytest.mark.parametrize("huge", [2**63, 2**64, 2**200, -(2**200)], ids=label)
def test_ids_beyond_64_bits_do_not_exist(huge):
    target = make_targets()
    for ids in (([huge], [1]), ([1], [huge])):
        with refused(BlockRangeError, *target.values(), match=str(huge)):
            copy_kv_blocks(make_sources(), target, *ids, "h2d")


@pytest.mark.parametrize("wrong", [5, "1", [1.0], [None], ["1"], {1}, [[1]]], ids=label)
def test_what_is_no_list_of_ids_is_refused(wrong):
    target = make_targets()
    for ids in ((wrong, [1]), ([1], wrong)):
        with refused((TypeError, ValueError), *target.values()):
            copy_kv_blocks(make_sources(), target, *ids, "h2d")


@pytest.mark.parametrize("ids", [[1, 1], [1, 6, 1], np.array([6, 6])], ids=label)
def test_a_destination_is_named_once(ids):
    target = make_targets()
    with refused(OverlapError, *target.values(), match=rf"\b{ids[-1]}\b"):
        copy_kv_blocks(make_sources(), target, [4, 0, 2][: len(ids)], ids, "h2d")


def test_faults_of_the_last_layer_change_nothing_in_the_first():
    source, last = make_sources(), NAMES[-1]

    def refuse(error, *, source_tensor=None, target_tensor=None):
        target = make_targets()
        ends = dict(source), target
        for end, changed in zip(ends, (source_tensor, target_tensor), strict=True):
            if changed is not None:
                end[last] = changed
        with refused(error, *(t for t in target.values() if isinstance(t, np.ndarray))):
            copy_kv_blocks(*ends, [4, 5], [1, 6], "d2h")

    refuse(BlockRangeError, source_tensor=source[last][:5])
    refuse(BlockRangeError, target_tensor=np.full((6, *SHAPE), 0xEEEE, np.uint16))
    refuse(LayoutError, target_tensor=np.full((7, 3, 2, 5), 0xEEEE, np.uint16))
    refuse(LayoutError, target_tensor=np.full((7, 3, 8), 0xEEEE, np.uint16))
    refuse(LayoutError, target_tensor=np.full((7, 2, 3, 4), 0xEEEE, np.uint16))
    refuse(LayoutError, target_tensor=np.full((7, *SHAPE), 0xEE, np.uint8))
    # As many bytes a row, in items of another size.
    refuse(LayoutError, target_tensor=np.full((7, 3, 2, 8), 0xEE, np.uint8))
    refuse(LayoutError, source_tensor=source[last].astype(np.uint32))
    refuse(LayoutError, target_tensor=np.array(0xEEEE, np.uint16))
    refuse((TypeError, LayoutError), source_tensor=5)
    refuse((TypeError, LayoutError), target_tensor=[1.0])
    fixed = np.full((7, *SHAPE), 0xEEEE, np.uint16)
    fixed.flags.writeable = False
    refuse(LayoutError, target_tensor=fixed)
    # The last layer writes what the first one reads: row 1 of its tensor is fine, row 4 is not.
    shared = make_sources()
    target = {**make_targets(), last: shared[NAMES[0]]}
    with refused(OverlapError, *shared.values(), *target.values()):
        copy_kv_blocks(shared, target, [4, 5], [1, 4], "h2d")
    expected = shared[last][[4, 5]]
    copy_kv_blocks(shared, target, [4, 5], [1, 3], "h2d")
    np.testing.assert_array_equal(shared[NAMES[0]][[1, 3]], expected)


def test_a_read_only_source_is_fine():
    source, target = make_sources(), make_targets()
    for tensor in source.values():
        tensor.flags.writeable = False
    copy_kv_blocks(source, target, [4], [1], "h2d")
    np.testing.assert_array_equal(target[NAMES[2]][1], source[NAMES[2]][4])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.int8,
        torch.int64,
    ],
)
def test_items_are_bytes_of_any_type(dtype):
    source = {name: strided((6, 3, 2, 5), item_bytes=dtype.itemsize, seed=i)
              for i, name in enumerate(NAMES)}  # fmt: skip
    target = {name: strided((7, 3, 2, 5), item_bytes=dtype.itemsize, seed=9) for name in NAMES}
    expected = {name: end.array.copy() for name, end in target.items()}
    for name in NAMES:
        expected[name][[1, 6]] = source[name].array[[4, 0]]
    ends = [{name: end.tensor(dtype) for name, end in side.items()} for side in (source, target)]
    copy_kv_blocks(*ends, torch.tensor([4, 0]), torch.tensor([1, 6]), "d2h")
    for name in NAMES:
        np.testing.assert_array_equal(target[name].array, expected[name])


def test_types_of_one_size_meet():
    source = make_sources()
    target = {name: torch.zeros(7, *SHAPE, dtype=torch.bfloat16) for name in NAMES}
    copy_kv_blocks(source, target, np.array([4, 0], np.int32), (1, 6), "h2d")
    for name in NAMES:
        bits = target[name].view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits[[1, 6]], source[name][[4, 0]])
        assert not bits[[0, 2, 3, 4, 5]].any()


STRIDES = {
    "dense": {},
    "padded rows": {"padding": [7, 0, 0, 0]},
    "padded everywhere": {"padding": [1, 2, 3, 0]},
    "heads outside tokens": {"memory_order": [0, 2, 1, 3]},
    "rows innermost": {"memory_order": [1, 2, 3, 0]},
    "rows between": {"memory_order": [1, 0, 2, 3], "padding": [0, 0, 5, 0]},
    "elements apart": {"innermost_step": 3},
}


@pytest.mark.parametrize("source_strides", STRIDES.values(), ids=STRIDES.keys())
@pytest.mark.parametrize("target_strides", STRIDES.values(), ids=STRIDES.keys())
def test_tensors_of_any_strides(source_strides, target_strides):
    source = strided((6, 3, 2, 5), **source_strides)
    target, expected = (strided((7, 3, 2, 5), **target_strides, seed=1) for _ in range(2))
    expected.array[[1, 6]] = source.array[[4, 0]]
    copy_kv_blocks({"a": source.array}, {"a": target.array}, [4, 0], [1, 6], "h2d")
    np.testing.assert_array_equal(target.memory, expected.memory)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 1, 3, 2, 1, 2)])
def test_rows_of_any_number_of_dimensions(shape):
    source, target = make_sources(shape=shape), make_targets(shape=shape)
    copy_kv_blocks(source, target, [4, 0], [1, 6], "h2d")
    for name in NAMES:
        np.testing.assert_array_equal(target[name][[1, 6]], source[name][[4, 0]])
        assert is_untouched(target[name][[0, 2, 3, 4, 5]])


def test_layers_may_differ_in_shape_and_type():
    source = {
        "wide": np.arange(60, dtype=np.uint32).reshape(6, 10),
        "narrow": np.arange(12, dtype=np.uint8).reshape(6, 2),
        "latent": torch.arange(18, dtype=torch.bfloat16).reshape(6, 3),
    }
    target = {
        "latent": torch.zeros(7, 3, dtype=torch.bfloat16),
        "narrow": np.zeros((9, 2), np.int8),
        "wide": np.zeros((7, 10), np.float32),
    }
    copy_kv_blocks(source, target, [5, 2], [0, 6], "h2d")
    np.testing.assert_array_equal(target["wide"].view(np.uint32)[[0, 6]], source["wide"][[5, 2]])
    np.testing.assert_array_equal(target["narrow"][[0, 6]], source["narrow"][[5, 2]])
    assert torch.equal(target["latent"][[0, 6]], source["latent"][[5, 2]])
    assert not target["narrow"][[1, 2, 3, 4, 5, 7, 8]].any()
    # A row must exist in every layer, not in the longest one.
    with refused(BlockRangeError, target["wide"], target["narrow"], match=r"\b8\b.*\b7\b"):
        copy_kv_blocks(source, target, [5], [8], "h2d")


def test_two_names_of_one_pair_are_copied_once():
    """Engines register layers that share a cache under a name each."""
    source, target = make_sources(), make_targets()
    first, second, third = NAMES
    source[second], target[second] = source[first], target[first]
    copy_kv_blocks(source, target, [4, 0], [1, 6], "h2d")
    for name in (first, third):
        np.testing.assert_array_equal(target[name][[1, 6]], source[name][[4, 0]])
        assert is_untouched(target[name][[0, 2, 3, 4, 5]])
    # The same memory, though another object.
    source[second], target[second] = source[first][:], target[first].view(np.int16)
    copy_kv_blocks(source, target, [5], [2], "h2d")
    np.testing.assert_array_equal(target[first][2], source[first][5])
    # The pair is looked at all the same.
    with refused(OverlapError, *target.values()):
        copy_kv_blocks(source, target, [5, 4], [2, 2], "h2d")


def test_one_target_of_two_sources_is_refused():
    source, target = make_sources(), make_targets()
    target[NAMES[2]] = target[NAMES[0]]
    with refused(OverlapError, *target.values()):
        copy_kv_blocks(source, target, [4, 0], [1, 6], "h2d")
    # Of one source in two views that are not the same rows.
    memory = np.arange(8 * 24, dtype=np.uint16).reshape(8, *SHAPE)
    source = {"a": memory[:6], "b": memory[1:7]}
    target = {"a": target[NAMES[0]], "b": target[NAMES[0]]}
    with refused(OverlapError, *target.values()):
        copy_kv_blocks(source, target, [4], [1], "h2d")


def test_one_source_of_two_targets_is_fine():
    source, target = make_sources(), make_targets()
    source[NAMES[2]] = source[NAMES[0]]
    copy_kv_blocks(source, target, [4, 0], [1, 6], "h2d")
    for name in NAMES:
        np.testing.assert_array_equal(target[name][[1, 6]], source[name][[4, 0]])


def test_targets_that_overlap_by_a_part_of_a_row():
    source = make_sources()
    flat = np.full(8 * 24, 0xEEEE, np.uint16)
    views = flat[: 7 * 24].reshape(7, *SHAPE), flat[12 : 12 + 7 * 24].reshape(7, *SHAPE)
    target = dict(zip(NAMES[:2], views, strict=True))
    del source[NAMES[2]]
    with refused(OverlapError, flat):
        copy_kv_blocks(source, target, [4], [1], "h2d")
    # Layers that interleave row by row share no byte.
    pool = np.full((7, 2, *SHAPE), 0xEEEE, np.uint16)
    copy_kv_blocks(source, dict(zip(NAMES[:2], (pool[:, 0], pool[:, 1]), strict=True)),
                   [4, 0], [1, 6], "h2d")  # fmt: skip
    for layer, name in enumerate(NAMES[:2]):
        np.testing.assert_array_equal(pool[[1, 6], layer], source[name][[4, 0]])


def test_rows_move_inside_one_dict():
    tensors = make_sources()
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    copy_kv_blocks(tensors, tensors, [4, 0], [1, 3], "d2h")
    for name in NAMES:
        np.testing.assert_array_equal(tensors[name][[1, 3]], before[name][[4, 0]])
        np.testing.assert_array_equal(tensors[name][[0, 2, 4, 5]], before[name][[0, 2, 4, 5]])
    for source_ids, target_ids in (([1], [1]), ([1, 2], [2, 1]), ([1, 2], [2, 3])):
        with refused(OverlapError, *tensors.values()):
            copy_kv_blocks(tensors, tensors, source_ids, target_ids, "d2h")


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("reverse", [False, True])
def test_strides_are_positive(axis, reverse):
    good = np.full((6, *SHAPE), 0xEEEE, np.uint16)
    if reverse:
        bad = np.flip(good.copy(), axis)
    else:
        steps = [0 if i == axis else step for i, step in enumerate(good.strides)]
        bad = np.lib.stride_tricks.as_strided(good.copy(), good.shape, steps)
    with refused(LayoutError, good, bad):
        copy_kv_blocks({"a": good}, {"a": bad}, [4], [1], "h2d")
    with refused(LayoutError, good, bad):
        copy_kv_blocks({"a": bad}, {"a": good}, [4], [1], "h2d")


def test_caches_are_dicts():
    source, target = make_sources(), make_targets()
    for wrong in (5, [source[NAMES[0]]], source[NAMES[0]], "caches"):
        with refused((TypeError, ValueError), *target.values()):
            copy_kv_blocks(wrong, target, [4], [1], "h2d")
        with refused((TypeError, ValueError), *target.values()):
            copy_kv_blocks(source, wrong, [4], [1], "h2d")


@pytest.mark.parametrize("threads", [1, 2, 1000, None])
def test_any_number_of_threads_gives_the_same_bytes(threads):
    """24 MiB in two layers: more than is copied on one thread."""
    rng = np.random.default_rng(0)
    source = {name: rng.integers(0, 1 << 16, (192, 32768), np.uint16) for name in "ab"}
    target = {name: np.full((200, 32768), 0xEEEE, np.uint16) for name in "ab"}
    source_ids, target_ids = rng.permutation(192), rng.permutation(200)[:192]
    copy_kv_blocks(source, target, source_ids, target_ids, "h2d", threads=threads)
    untouched = np.setdiff1d(np.arange(200), target_ids)
    for name in "ab":
        np.testing.assert_array_equal(target[name][target_ids], source[name][source_ids])
        assert is_untouched(target[name][untouched])


@pytest.mark.parametrize("threads", [0, -1, 2**200], ids=label)
def test_threads_are_checked(threads):
    target = make_targets()
    with refused(ValueError, *target.values(), match="threads"):
        copy_kv_blocks(make_sources(), target, [4], [1], "h2d", threads=threads)


def test_other_threads_run_while_bytes_move():
    """128 MiB in two layers."""
    source, target = ({name: np.ones((1024, 32768), np.uint16) for name in "ab"} for _ in range(2))
    ids = np.random.default_rng(0).permutation(1024)
    assert_other_threads_run(lambda: copy_kv_blocks(source, target, ids, ids, "h2d", threads=1))


@pytest.mark.parametrize("stream", [None, 0, 1, 0x7F00_0000_0000])
def test_host_memory_needs_no_stream_and_may_have_one(stream):
    source, target = make_sources(), make_targets()
    copy_kv_blocks(source, target, [4, 0], [1, 6], "h2d", stream=stream)
    for name in NAMES:
        np.testing.assert_array_equal(target[name][[1, 6]], source[name][[4, 0]])
        assert is_untouched(target[name][[0, 2, 3, 4, 5]])


def test_tensors_are_given_back_once():
    for error, ids in ((None, [1]), (BlockRangeError, [10])):
        ends = [{name: Producer((10, 4, 2, 8)) for name in "ab"} for _ in range(2)]
        if error is None:
            copy_kv_blocks(*ends, ids, [2], "h2d")
        else:
            with pytest.raises(error):
                copy_kv_blocks(*ends, ids, [2], "h2d")
        for end in ends:
            for producer in end.values():
                assert producer.exported >= 1
                assert producer.deleted == producer.exported


@pytest.mark.parametrize("narrow_first", [True, False])
def test_pairs_of_other_item_sizes_are_pairs_of_their_own(narrow_first):
    source, target = (
        np.arange(1, 9, dtype=np.uint16).reshape(8, 1) * 257,
        np.zeros((8, 1), np.uint16),
    )
    layers = {"wide": (source, target)}
    narrow = {"narrow": (source.view(np.uint8)[:, :1], target.view(np.uint8)[:, :1])}
    layers = {**narrow, **layers} if narrow_first else {**layers, **narrow}
    before = target.copy()
    with pytest.raises(OverlapError):
        copy_kv_blocks(
            {name: pair[0] for name, pair in layers.items()},
            {name: pair[1] for name, pair in layers.items()},
            range(8),
            range(8),
            "d2h",
        )
    np.testing.assert_array_equal(target, before)


def test_nothing_is_nothing():
    tensor = {"a": np.ones((3, 2))}
    target = {"a": np.zeros((3, 2))}
    for arguments in [
        (None, target, [0], [1]),
        (tensor, None, [0], [1]),
        (tensor, target, None, [1]),
        (tensor, target, [0], None),
        (tensor, {}, [0], [1]),
    ]:
        copy_kv_blocks(*arguments, "h2d")
    assert not target["a"].any()
    with pytest.raises(BlockRangeError, match="'a'"):
        copy_kv_blocks(tensor, {}, [0], [1], "h2d", strict=True)
