"""The reference judged by hand-computed cases: it needs no planner, only numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.testing import (
    apply_descriptors,
    check_reference,
    due_tokens,
    expected_bytes,
    expected_error,
    expected_pairs,
    fill_reference,
    holders,
    poison,
    readers,
    slots,
    snapshot,
    tensor_shape,
)


def group(layers=(0,), heads=2, dim=4, **changes):
    fields = {
        "layers": layers,
        "num_kv_heads": heads,
        "head_dim": dim,
        "v_head_dim": None,
        "dtype": "bfloat16",
        "sliding_window": -1,
        "tokens_per_slot": 1,
    }
    return SimpleNamespace(**{**fields, **changes})


def engine(*groups, tokens_per_block=4, layout="KBNHD", tp_size=1, **changes):
    fields = {
        "model": SimpleNamespace(groups=groups or (group(),)),
        "tokens_per_block": tokens_per_block,
        "layout": layout,
        "tp_size": tp_size,
        "pp_size": 1,
        "cp_size": 1,
        "head_ranges": None,
        "null_block_id": None,
        "physical_blocks_per_block": 1,
        "num_blocks": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def dense(an_engine, rank, num_blocks):
    shapes = [tensor_shape(an_engine, rank, slot, num_blocks) for slot in slots(an_engine, rank)]
    return [np.zeros(shape, np.uint8) for shape in shapes]


def copied(source, target, rank, source_blocks, target_blocks, tokens, **firsts):
    """Copy by the slowest means: fill every token's row by itself, through the due tokens."""
    tensors = dense(target, rank, 40)
    poison(tensors)
    for g in range(len(target.model.groups)):
        due = due_tokens(
            source, target, g, source_blocks, target_blocks, tokens,
            firsts.get("source_first_token", 0), firsts.get("target_first_token", 0),
        )  # fmt: skip
        filled = dense(target, rank, 40)
        fill_reference(
            target, rank, filled, target_blocks, first_token=firsts.get("target_first_token", 0)
        )
        first, tpb = firsts.get("target_first_token", 0), target.tokens_per_block
        for slot, (to, filled_tensor) in enumerate(zip(tensors, filled, strict=True)):
            assert slots(target, rank)[slot].group == g == 0
            for token in due.tolist():
                block, entry = target_blocks[g][(token - first) // tpb], (token - first) % tpb
                to[:, block, entry] = filled_tensor[:, block, entry]
    return tensors


class TestWhoHoldsWhat:
    def test_two_heads_on_four_ranks_are_replicas(self):
        wide = engine(tp_size=4)
        assert [holders(wide, 0, 0, head) for head in (0, 1)] == [[0, 1], [2, 3]]

    def test_each_of_four_targets_gets_its_one_head(self):
        narrow, wide = engine(), engine(tp_size=4)
        for rank in range(4):
            pairs, notify_only = expected_pairs(narrow, wide, rank, [[1]], [[1]], (0, 4))
            assert (pairs, notify_only) == ({(0, rank)}, set())
            payload = expected_bytes(narrow, wide, rank, [[1]], [[1]], (0, 4))
            assert payload == {0: 4 * 2 * 4 * 2}, "4 tokens, two planes, 4 elements of 2 bytes"
        assert readers(narrow, wide, 0) == (0, 1, 2, 3)

    def test_of_four_replicas_two_are_read_and_two_are_told(self):
        wide, narrow = engine(tp_size=4), engine()
        pairs, notify_only = expected_pairs(wide, narrow, 0, [[1]], [[1]], (0, 4))
        assert (pairs, notify_only) == ({(0, 0), (2, 0)}, {1, 3})
        assert [readers(wide, narrow, rank) for rank in range(4)] == [(0,)] * 4

    def test_six_heads_from_three_ranks_to_two(self):
        source, target = (engine(group(heads=6), tp_size=size) for size in (3, 2))
        blocks = [[0]], [[0]], (0, 1)
        head_bytes = 2 * 4 * 2
        assert expected_bytes(source, target, 0, *blocks) == {0: 2 * head_bytes, 1: head_bytes}
        assert expected_bytes(source, target, 1, *blocks) == {1: head_bytes, 2: 2 * head_bytes}
        assert [readers(source, target, rank) for rank in range(3)] == [(0,), (0, 1), (1,)]

    def test_replicas_share_the_readers_between_them(self):
        source, target = engine(group(heads=1), tp_size=2), engine(group(heads=1), tp_size=4)
        pairs = [expected_pairs(source, target, r, [[0]], [[0]], (0, 4))[0] for r in range(4)]
        assert pairs == [{(0, 0)}, {(0, 1)}, {(1, 2)}, {(1, 3)}]

    def test_uneven_and_overlapping_head_ranges(self):
        uneven = engine(group(heads=3), tp_size=2, head_ranges=((0, 1), (0, 3)))
        assert [holders(uneven, 0, 0, head) for head in range(3)] == [[0, 1], [1], [1]]
        split = (((0, 1), (1, 2)), ((0, 3), (2, 3)))
        per_group = engine(group(), group((1,), heads=3), tp_size=2, head_ranges=split)
        assert [holders(per_group, 1, 1, head) for head in range(3)] == [[0], [0], [0, 1]]

    def test_an_empty_request_tells_everyone(self):
        source, target = engine(tp_size=4), engine()
        assert expected_pairs(source, target, 0, [[]], [[]], (0, 0)) == (set(), {0, 1, 2, 3})


class TestSlots:
    def test_planes_and_layers_make_tensors(self):
        layers = group((5, 2), heads=3, v_head_dim=6)
        per_layer = [(slot.layers, slot.planes) for slot in slots(engine(layers, layout="BNHD"), 0)]
        assert per_layer == [((2,), ("K",)), ((2,), ("V",)), ((5,), ("K",)), ((5,), ("V",))]
        spanning = engine(layers, layout="LBHNC")
        (slot,) = slots(spanning, 0)
        assert (slot.layers, slot.planes) == ((2, 5), ("K", "V"))
        assert tensor_shape(spanning, 0, slot, 7) == (2, 7, 3, 4, 2 * (4 + 6))

    def test_half_byte_elements_and_slots_of_several_tokens(self):
        packed = engine(group(dtype="float4_e2m1fn_x2", tokens_per_slot=2), layout="NHD")
        assert tensor_shape(packed, 0, slots(packed, 0)[0], 9) == (2, 9, 2, 2, 2)

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"pp_size": 2}, "pp_size"),
            ({"cp_size": 2}, "cp_size"),
            ({"physical_blocks_per_block": 2}, "physical_blocks_per_block"),
        ],
    )
    def test_what_is_not_modelled_is_refused_by_name(self, changes, name):
        with pytest.raises(NotImplementedError, match=name):
            slots(engine(**changes), 0)


class TestDue:
    def test_what_the_target_holds_is_not_due(self):
        source, target = engine(tokens_per_block=64), engine(tokens_per_block=64)
        lists = [list(range(33))], [[40, 41]]
        due = due_tokens(source, target, 0, *lists, (0, 2049), 0, 31 * 64)
        assert due.tolist() == list(range(1984, 2049))
        assert not expected_error(source, target, *lists, (0, 2049), 0, 31 * 64)
        one_more = [list(range(34))], [[40, 41]]
        again = due_tokens(source, target, 0, *one_more, (0, 2049), 0, 31 * 64)
        assert again.tolist() == due.tolist()

    def test_null_blocks_are_not_due(self):
        source, target = engine(), engine(null_block_id=-7)
        due = due_tokens(source, target, 0, [[0, 1, 2]], [[3, -7, 4]], (2, 11))
        assert due.tolist() == [2, 3, 8, 9, 10]

    def test_a_window_is_the_last_tokens_of_the_range(self):
        windowed = engine(group(sliding_window=3))
        due = due_tokens(windowed, windowed, 0, [[0, 1, 2]], [[0, 1, 2]], (0, 10))
        assert due.tolist() == [7, 8, 9]

    def test_groups_that_share_no_layer_are_checked_and_move_nothing(self):
        source, target = engine(group((0,))), engine(group((0,)), group((1,)))
        request = ([[0]], [[0], [0]], (0, 4))
        assert due_tokens(source, target, 1, *request).size == 4
        assert expected_bytes(source, target, 0, *request) == {0: 4 * 2 * 2 * 4 * 2}
        assert not expected_error(source, target, *request)
        assert expected_error(source, target, [[0]], [[0], []], (0, 4)) == {"BlockRangeError"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"tokens": (5, 4)}, {"ValueError"}),
        ({"tokens": (-4, 4)}, {"ValueError"}),
        ({"source_first_token": 3}, {"AlignmentError", "BlockRangeError"}),
        ({"target_first_token": 6}, {"AlignmentError"}),
        ({"source_first_token": 4}, {"BlockRangeError"}),
        ({"source_blocks": [[0, 1]]}, {"BlockRangeError"}),
        ({"target_blocks": [[0, 1]]}, {"BlockRangeError"}),
        ({"target_blocks": [[0, 1, 0]]}, {"OverlapError"}),
        ({"target_blocks": [[0, 1, 2, 0]]}, set()),
        ({"source_blocks": [[0, 0, 0]]}, set()),
        ({"source_blocks": [[0, 9, 2]]}, {"BlockRangeError"}),
        ({"source_blocks": [[0, 1, 2, 9]]}, set()),
        ({"source_blocks": [[0, 1, 2, -1]]}, {"BlockRangeError"}),
        ({"source_blocks": [[0, 1, 2, 30]]}, {"BlockRangeError"}),
        ({"target_blocks": [[-1, 1, 2]]}, {"BlockRangeError"}),
        ({"source_blocks": []}, {"ValueError"}),
    ],
)
def test_bad_requests_are_named(changes, names):
    request = {
        "source_blocks": [[0, 1, 2]],
        "target_blocks": [[0, 1, 2]],
        "tokens": (0, 10),
    }
    source = engine(null_block_id=9, num_blocks=20)
    assert expected_error(source, engine(), **{**request, **changes}) == names


def test_a_range_inside_a_slot_is_misaligned():
    slotted = engine(group(tokens_per_slot=2))
    lists = [[0, 1, 2]], [[0, 1, 2]]
    assert expected_error(slotted, slotted, *lists, (0, 9)) == {"AlignmentError"}
    assert not expected_error(slotted, slotted, *lists, (2, 10))


class TestCheck:
    """One request over three blocks of which the ends are partly due, and every way to spoil it."""

    source = engine(group(heads=3), tokens_per_block=8, layout="BHNC")
    target = engine(group(heads=3), tp_size=2)
    request = ([[3, 2]], [[5, 9, 0]], (2, 11))

    def judge(self, tensors, before=None):
        return check_reference(self.source, self.target, 1, tensors, before, *self.request)

    def good(self):
        return copied(self.source, self.target, 1, *self.request)

    def test_a_good_copy_passes(self):
        tensors = self.good()
        assert self.judge(tensors) is None
        before = dense(self.target, 1, 40)
        poison(before)
        assert self.judge(tensors, before) is None

    def test_nothing_copied_is_noticed(self):
        tensors = dense(self.target, 1, 40)
        poison(tensors)
        mismatch = self.judge(tensors)
        assert (mismatch.block, mismatch.token, mismatch.head) == (5, 2, 1)

    def test_every_single_flipped_byte_is_noticed(self):
        tensors = self.good()
        flat = tensors[0].reshape(-1)
        for i in np.random.default_rng(0).permutation(flat.size)[:300].tolist():
            flat[i] ^= 1
            mismatch = self.judge(tensors)
            plane, block, entry, head, byte = np.unravel_index(i, tensors[0].shape)
            assert mismatch.offset_bytes == i
            assert mismatch.expected[0] ^ mismatch.found[0] == 1
            place = ("KV"[plane], block, head + 1, byte // 2)
            assert (mismatch.plane, mismatch.block, mismatch.head, mismatch.dim) == place
            listed = {5: 0, 9: 4, 0: 8}
            token = listed.get(int(block), -100) + int(entry)
            assert mismatch.token == (token if 2 <= token < 11 else None)
            assert f"byte {i}" in str(mismatch)
            flat[i] ^= 1
        assert self.judge(tensors) is None

    def test_swapped_planes_are_noticed(self):
        tensors = self.good()
        tensors[0][:, 9] = tensors[0][::-1, 9].copy()
        assert self.judge(tensors).token == 4

    def test_a_shifted_token_is_noticed(self):
        tensors = self.good()
        tensors[0][:, 9] = np.roll(tensors[0][:, 9], 1, axis=1)
        assert self.judge(tensors).token == 4

    def test_swapped_heads_are_noticed(self):
        tensors = self.good()
        tensors[0][:, 9, 2] = tensors[0][:, 9, 2, ::-1].copy()
        mismatch = self.judge(tensors)
        assert (mismatch.token, mismatch.head) == (6, 1)

    def test_a_swapped_layer_is_noticed(self):
        two = engine(group((3, 4)), layout="LBKNHD")
        tensors = dense(two, 0, 3)
        fill_reference(two, 0, tensors, [[0, 1]])
        before = snapshot(tensors)
        assert check_reference(two, two, 0, tensors, before, [[0, 1]], [[0, 1]], (0, 8)) is None
        tensors[0][:] = tensors[0][::-1].copy()
        mismatch = check_reference(two, two, 0, tensors, before, [[0, 1]], [[0, 1]], (0, 8))
        assert mismatch.layer == 3

    def test_a_byte_too_many_is_noticed(self):
        tensors = self.good()
        tensors[0][0, 9, 0, 0, 1:] = tensors[0][0, 9, 0, 0, :-1].copy()
        assert self.judge(tensors).offset_bytes % 8 == 1


def test_padding_is_poisoned_kept_and_judged():
    plain = engine(group(heads=1))
    memory = np.zeros((2, 3, 4, 1, 12), np.uint8)
    padded = [memory[..., :8]]
    poison(padded)
    assert memory.reshape(-1)[:-4].any() and not memory.reshape(-1)[-4:].any()
    copy = snapshot(padded)
    assert copy[0].strides == padded[0].strides and (copy[0] == padded[0]).all()
    request = ([[]], [[]], (0, 0))
    memory[1, 2, 0, 0, 9] ^= 0xFF
    for before in (None, copy):
        mismatch = check_reference(plain, plain, 0, padded, before, *request)
        assert (mismatch.layer, mismatch.offset_bytes) == (None, (1 * 3 + 2) * 4 * 12 + 9)
        assert "padding" in str(mismatch)
    assert check_reference(plain, plain, 0, padded, [padded[0].copy()], *request) is None


def test_interleaved_tensors_are_judged_as_one_stretch():
    pair = engine(group((0, 1)), layout="BKNHD")
    memory = np.zeros((3, 2, 2, 4, 2, 8), np.uint8)
    tensors = [memory[:, 0], memory[:, 1]]
    poison(tensors)
    before = snapshot(tensors)
    assert (memory != 0).mean() > 0.9
    for expected in (None, before):
        assert check_reference(pair, pair, 0, tensors, expected, [[]], [[]], (0, 0)) is None
    memory[2, 1, 1, 3, 1, 7] ^= 1
    mismatch = check_reference(pair, pair, 0, tensors, before, [[]], [[]], (0, 0))
    place = (mismatch.slot, mismatch.layer, mismatch.plane, mismatch.block, mismatch.head)
    assert place == (1, 1, "V", 2, 1) and mismatch.dim == 3


def test_a_source_block_listed_twice_holds_its_last_place():
    plain = engine()
    source, target = dense(plain, 0, 4), dense(plain, 0, 4)
    fill_reference(plain, 0, source, [[2, 1, 2]])
    target[0][:, [0, 1, 3]] = source[0][:, [2, 1, 2]]
    request = ([[2, 1, 2]], [[0, 1, 3]], (0, 12))
    assert check_reference(plain, plain, 0, target, snapshot(target), *request) is None
    assert (target[0][:, 0] == target[0][:, 3]).all()


def test_marked_ranks_tell_replicas_apart():
    source, target = engine(group(heads=1), tp_size=2), engine(group(heads=1), tp_size=2)
    request = ([[0]], [[0]], (0, 4))
    caches = [dense(source, rank, 1) for rank in range(2)]
    for rank, tensors in enumerate(caches):
        fill_reference(source, rank, tensors, [[0]], mark_rank=True)
    before = snapshot(caches[1])
    judged = [
        check_reference(source, target, 1, tensors, before, *request, mark_rank=True)
        for tensors in caches
    ]
    assert judged[1] is None and judged[0].token == 0


def rows(*entries):
    columns = np.array(entries, np.int64).reshape(-1, 5).T
    names = ("source_tensor", "source_offset", "target_tensor", "target_offset", "length")
    return SimpleNamespace(**dict(zip(names, columns, strict=True)))


class TestDescriptors:
    @pytest.mark.parametrize(
        ("entries", "fault"),
        [
            ([(0, 0, 0, 0, 0)], "empty"),
            ([(0, 13, 0, 0, 4)], "reads outside"),
            ([(0, 0, 0, 14, 4)], "writes outside"),
            ([(0, -1, 0, 0, 4)], "reads outside"),
            ([(1, 0, 0, 0, 4)], "reads a tensor"),
            ([(0, 0, 0, 8, 4), (0, 0, 0, 0, 4)], "sorted"),
            ([(0, 0, 0, 0, 4), (0, 8, 0, 3, 4)], "same byte"),
            ([(0, 0, 0, 0, 4), (0, 4, 0, 4, 4)], "could be one"),
        ],
    )
    def test_a_broken_promise_is_noticed(self, entries, fault):
        tensors = [np.zeros(16, np.uint8)]
        with pytest.raises(AssertionError, match=fault):
            apply_descriptors(rows(*entries), tensors, tensors)

    def test_bytes_move_through_padding(self):
        source = np.arange(32, dtype=np.uint8).reshape(4, 8)[:, :4].view(np.uint16)
        target = np.zeros((2, 12), np.uint8)
        apply_descriptors(rows((0, 8, 0, 4, 4), (0, 24, 0, 12, 4)), [source], [target[:, :6]])
        assert target.reshape(-1).tolist() == [
            *[0] * 4, 8, 9, 10, 11, *[0] * 4, 24, 25, 26, 27, *[0] * 8,
        ]  # fmt: skip
