"""Byte moves judged by hand: descriptors run, loops expanded, neighbours merged."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from by_hand import dense, engine, group, part, state

from kvferry.testing import (
    apply_descriptors,
    apply_staged_descriptors,
    coalesce,
    expand_loops,
    expected_moves,
    greedy_count,
)


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


def staged(*entries):
    columns = np.array(entries, np.int64).reshape(-1, 4).T
    names = ("source_tensor", "source_offset", "scratch_offset", "length")
    return SimpleNamespace(**dict(zip(names, columns, strict=True)))


class TestStagedDescriptors:
    @pytest.mark.parametrize(
        ("entries", "fault"),
        [
            ([(0, 0, 0, 0)], "empty"),
            ([(1, 0, 0, 1)], "reads a tensor"),
            ([(0, 13, 0, 4)], "reads outside"),
            ([(0, -1, 0, 4)], "reads outside"),
            ([(0, 0, 5, 4)], "writes outside"),
            ([(0, 0, 0, 4), (0, 8, 3, 4)], "again"),
        ],
    )
    def test_a_broken_promise_is_noticed(self, entries, fault):
        with pytest.raises(AssertionError, match=fault):
            apply_staged_descriptors(
                staged(*entries), [np.zeros(16, np.uint8)], np.zeros(8, np.uint8)
            )

    def test_bytes_move(self):
        scratch = np.zeros(6, np.uint8)
        source = np.arange(16, dtype=np.uint8)
        apply_staged_descriptors(staged((0, 9, 4, 2), (0, 1, 0, 3)), [source], scratch)
        assert scratch.tolist() == [1, 2, 3, 0, 9, 10]


class TestMerging:
    def test_neighbours_on_both_sides_are_one(self):
        runs = np.array([(0, 8, 0, 4, 4), (0, 4, 0, 0, 4), (0, 12, 0, 8, 2), (0, 14, 1, 10, 2)])
        assert coalesce(runs).tolist() == [[0, 4, 0, 0, 10], [0, 14, 1, 10, 2]]

    def test_one_side_is_not_enough(self):
        runs = np.array([(0, 0, 0, 0, 4), (0, 5, 0, 4, 4), (1, 9, 0, 8, 4)])
        assert coalesce(runs).tolist() == runs.tolist()
        assert coalesce(np.zeros((0, 5), np.int64)).shape == (0, 5)

    def test_a_greedy_coalescer_sees_what_follows(self):
        runs = np.array([(0, 4, 0, 4, 4), (0, 0, 0, 0, 4)])
        assert greedy_count(runs) == greedy_count(runs[::-1]) == 1


def test_loops_stand_for_runs():
    loops = SimpleNamespace(
        source_tensor=np.array([1, 0]), source_offset=np.array([100, 7]),
        target_tensor=np.array([2, 0]), target_offset=np.array([50, 9]),
        run_bytes=np.array([4, 1]),
        counts=np.array([[1, 1, 2, 2], [1, 1, 1, 1]]),
        source_strides=np.array([[0, 0, 40, 8], [0, 0, 0, 0]]),
        target_strides=np.array([[0, 0, 10, 5], [0, 0, 0, 0]]),
        table_begin=np.array([0, 1]), table_end=np.array([1, 3]),
        source_table=np.array([0, 1000, 2000]), target_table=np.array([0, 300, 100]),
    )  # fmt: skip
    with_length = type("Loops", (SimpleNamespace,), {"__len__": lambda self: 2})(**vars(loops))
    assert expand_loops(with_length).tolist() == [
        [1, 100, 2, 50, 4],
        [1, 108, 2, 55, 4],
        [1, 140, 2, 60, 4],
        [1, 148, 2, 65, 4],
        [0, 1007, 0, 309, 1],
        [0, 2007, 0, 109, 1],
    ]


def test_moves_of_heads_are_a_row_a_token_and_head():
    source = engine(group(heads=4, dim=1), tp_size=2, layout="BHNC", tokens_per_block=2)
    target = engine(group(heads=4, dim=1), layout="BNHD", tokens_per_block=4)
    ends = dense(source, 1, 3), dense(target, 0, 2)
    moves = expected_moves(source, target, 1, 0, *ends, [[2, 0]], [[1]], (1, 3))
    # Source [blocks, 2 heads, 2 tokens, 4 bytes], target [blocks, 4 tokens, 4 heads, 2 bytes].
    keys = [
        [0, 2 * 16 + 4, 0, 32 + 8 + 4, 2],
        [0, 2 * 16 + 4 + 8, 0, 32 + 8 + 6, 2],
        [0, 0, 0, 32 + 16 + 4, 2],
        [0, 8, 0, 32 + 16 + 6, 2],
    ]
    values = [[0, read + 2, 1, written, 2] for _, read, _, written, _ in keys]
    assert moves.tolist() == keys + values


def test_moves_of_a_state_are_its_stretches():
    conv = state(part("conv", (2, 6), axis=1, units=3))
    source, target = engine(conv), engine(conv, tp_size=2)
    ends = dense(source, 0, 2), dense(target, 1, 3)
    moves = expected_moves(source, target, 0, 1, *ends, [[1]], [[2]], (0, 0))
    assert moves.tolist() == [
        [0, 12 + 2, 0, 16 + 0, 2],
        [0, 12 + 8, 0, 16 + 4, 2],
        [0, 12 + 4, 0, 16 + 2, 2],
        [0, 12 + 10, 0, 16 + 6, 2],
    ]
    assert coalesce(moves).tolist() == [[0, 14, 0, 16, 4], [0, 20, 0, 20, 4]]
