"""The reference's routing judged by hand: who holds what, who reads from whom, what is due."""

from __future__ import annotations

import pytest
from by_hand import engine, group, latent, part, state

from kvferry.testing import (
    due_tokens,
    expected_bytes,
    expected_error,
    expected_pairs,
    expected_push_bytes,
    holders,
    readers,
)


class TestWhoHoldsWhat:
    def test_two_heads_on_four_ranks_are_replicas(self):
        wide = engine(tp_size=4)
        assert [holders(wide, 0, 0, "K", head) for head in (0, 1)] == [[0, 1], [2, 3]]

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
        assert [holders(uneven, 0, 0, "V", head) for head in range(3)] == [[0, 1], [1], [1]]
        split = (((0, 1), (1, 2)), ((0, 3), (2, 3)))
        per_group = engine(group(), group((1,), heads=3), tp_size=2, head_ranges=split)
        assert [holders(per_group, 1, 1, "K", head) for head in range(3)] == [[0], [0], [0, 1]]

    def test_an_empty_request_tells_everyone(self):
        source, target = engine(tp_size=4), engine()
        assert expected_pairs(source, target, 0, [[]], [[]], (0, 0)) == (set(), {0, 1, 2, 3})


class TestLatents:
    """Four ranks have the same; each target reads from one of them, and tells the others."""

    source, target = engine(latent(), tp_size=4), engine(latent(), tp_size=2)
    request = [[0]], [[0]], (0, 3)

    def test_each_target_has_a_source_of_its_own(self):
        assert holders(self.source, 0, 0, "latent", 0) == [0, 1, 2, 3]
        judged = [expected_pairs(self.source, self.target, r, *self.request) for r in range(2)]
        assert judged == [({(0, 0)}, {1, 2, 3}), ({(2, 1)}, {0, 1, 3})]
        assert expected_bytes(self.source, self.target, 1, *self.request) == {2: 3 * 6}

    def test_everyone_waits_for_all_targets(self):
        assert [readers(self.source, self.target, rank) for rank in range(4)] == [(0, 1)] * 4

    def test_what_is_pulled_is_pushed(self):
        pushed = [expected_push_bytes(self.source, self.target, r, *self.request) for r in range(4)]
        assert pushed == [{0: 18}, {}, {1: 18}, {}]


class TestStates:
    """`x` has 8 units; `B` has 2, fewer than the 4 ranks of an engine."""

    group = state(part("x", (8, 5)), part("B", (2 * 3,), units=2), part("all", (7,), axis=None))
    wide, narrow = engine(group, tp_size=4), engine(group)

    def test_few_units_are_replicas(self):
        assert [holders(self.wide, 0, 0, "x", unit) for unit in (0, 1, 7)] == [[0], [0], [3]]
        assert [holders(self.wide, 0, 0, "B", unit) for unit in (0, 1)] == [[0, 1], [2, 3]]
        assert holders(self.wide, 0, 0, "all", 0) == [0, 1, 2, 3]

    def test_every_part_comes_from_its_own_ranks(self):
        payload = expected_bytes(self.wide, self.narrow, 0, [[4]], [[2]], (0, 0))
        assert payload == {0: 2 * 5 + 3 + 7, 1: 2 * 5, 2: 2 * 5 + 3, 3: 2 * 5}
        payload = expected_bytes(self.narrow, self.wide, 1, [[4]], [[2]], (0, 0))
        assert payload == {0: 2 * 5 + 3 + 7}

    def test_a_state_moves_when_both_sides_have_a_slot(self):
        nulls = engine(self.group, null_block_id=9)
        for blocks in ([[]], [[9]]):
            assert expected_pairs(nulls, nulls, 0, blocks, [[1]], (0, 8)) == (set(), {0})
            assert expected_pairs(nulls, nulls, 0, [[1]], blocks, (0, 8)) == (set(), {0})
            assert not expected_error(nulls, nulls, blocks, [[1]], (0, 8))
        assert expected_pairs(nulls, nulls, 0, [[0]], [[1]], (8, 8)) == ({(0, 0)}, set())

    def test_one_slot_is_all_there_is(self):
        for blocks in ([[1, 2]], [[1]]), ([[1]], [[1, 2]]):
            assert expected_error(self.narrow, self.wide, *blocks, (0, 0)) == {"BlockRangeError"}
        assert not expected_error(self.narrow, self.wide, [[1]], [[1]], (0, 0), 3, 5)

    def test_every_cp_rank_has_the_whole_state(self):
        split = engine(self.group, cp_size=2)
        assert holders(split, 0, 0, "x", 3) == [0, 1]
        assert expected_pairs(split, self.narrow, 0, [[1]], [[1]], (0, 0)) == ({(0, 0)}, {1})
        pairs = [expected_pairs(split, split, r, [[1]], [[1]], (0, 0))[0] for r in range(2)]
        assert pairs == [{(0, 0)}, {(1, 1)}]
        assert [readers(split, split, rank) for rank in range(2)] == [(0, 1)] * 2

    def test_a_parallel_hybrid_has_both(self):
        hybrid = engine(group((0,), heads=1), state(part("s", (5,)), layers=(0,)), tp_size=1)
        payload = expected_bytes(hybrid, hybrid, 0, [[0], [1]], [[0], [1]], (0, 3))
        assert payload == {0: 3 * 2 * 4 * 2 + 5}


class TestContextParallel:
    def test_ranks_that_share_no_position_do_not_meet(self):
        split = engine(cp_size=2)
        assert [readers(split, split, rank) for rank in range(2)] == [(0,), (1,)]
        assert expected_pairs(split, split, 1, [[0]], [[0]], (0, 4)) == ({(1, 1)}, set())
        assert expected_pairs(split, split, 1, [[0]], [[0]], (0, 1)) == (set(), {1})

    def test_other_interleaves_do_meet(self):
        ones, twos = engine(cp_size=2), engine(cp_size=2, cp_interleave=2)
        assert [readers(ones, twos, rank) for rank in range(2)] == [(0, 1)] * 2
        row = 2 * 2 * 4 * 2
        assert expected_bytes(ones, twos, 0, [[0]], [[0]], (0, 3)) == {0: row, 1: row}
        assert expected_bytes(ones, twos, 1, [[0]], [[0]], (0, 3)) == {0: row}

    def test_one_token_comes_from_its_rank(self):
        split, whole = engine(cp_size=2), engine()
        assert holders(split, 0, 0, "K", 1, token=3) == [1]
        assert expected_pairs(split, whole, 0, [[0]], [[0]], (2, 3)) == ({(0, 0)}, {1})
        assert readers(split, whole, 1) == (0,)

    def test_replicas_of_a_token_are_those_of_its_cp_rank(self):
        split = engine(group(heads=1), tp_size=2, cp_size=2)
        assert holders(split, 0, 0, "K", 0, token=5) == [1, 3]
        whole = engine(group(heads=1), tp_size=2)
        pairs = [expected_pairs(split, whole, r, [[0]], [[0]], (0, 4))[0] for r in range(2)]
        assert pairs == [{(0, 0), (1, 0)}, {(2, 1), (3, 1)}]


class TestStages:
    def test_layers_are_on_their_stages(self):
        layers = group((0, 1, 3))
        even = engine(layers, tp_size=2, pp_size=2, cp_size=2)
        assert holders(even, 0, 1, "K", 0, token=1) == [1]
        assert holders(even, 0, 3, "K", 0, token=1) == [(1 * 2 + 0) * 2 + 1]
        uneven = engine(layers, pp_size=2, pp_layers=((0, 1), (1, 4)))
        assert [holders(uneven, 0, layer, "V", 0) for layer in (0, 1, 3)] == [[0], [1], [1]]
        row = 2 * 2 * 4 * 2
        assert expected_bytes(uneven, engine(layers), 0, [[0]], [[0]], (0, 1)) == {
            0: row,
            1: 2 * row,
        }
        assert readers(uneven, even, 0) == (0, 1, 2, 3)
        assert readers(uneven, even, 1) == tuple(range(8))

    def test_stages_that_do_not_divide_are_named(self):
        with pytest.raises(ValueError, match="pp_layers"):
            holders(engine(group((0, 2)), pp_size=2), 0, 0, "K", 0)


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
