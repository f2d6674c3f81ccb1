"""Requests tracked until every rank has acknowledged them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TransferError
from kvferry.outputs import TransferTracker


def test_a_rank_counts_once_however_often_it_speaks():
    """One worker acknowledges twice, another not at all: the request stays open."""
    tracker = TransferTracker(2)
    tracker.open("a")
    assert [tracker.ack("a", 0), tracker.ack("a", 0), tracker.ack("a", 0)] == [False] * 3
    assert len(tracker) == 1
    assert tracker.ack("a", 1) is True
    assert tracker.ack("a", 1) is False
    assert (len(tracker), tracker.late) == (0, 1)


def test_named_ranks_are_the_ones_that_count():
    tracker = TransferTracker([1, 3])
    tracker.open("a")
    assert not tracker.ack("a", 0)
    assert not tracker.ack("a", 1)
    assert not tracker.ack("a", 2)
    assert tracker.ack("a", 3)


def test_opening_an_open_request_changes_nothing():
    tracker = TransferTracker(2)
    tracker.open("a")
    tracker.ack("a", 0)
    tracker.open("a")
    assert (len(tracker), tracker.ack("a", 1)) == (1, True)


def test_what_was_never_opened_does_nothing():
    tracker = TransferTracker(1)
    assert tracker.ack("a", 0) is False
    tracker.failed("a", 0, [(0, 1)])
    assert tracker.failed_blocks("a") == ()
    assert (len(tracker), tracker.late, tracker.cancel("a")) == (0, 0, False)


def test_failed_blocks_name_the_group_of_each():
    """A receive fails in the second group of a hybrid model: its blocks are named as its own."""
    tracker = TransferTracker(2)
    tracker.open("a")
    tracker.failed("a", 0, [(1, 7), (1, 8)])
    tracker.failed("a", 1, [(0, 7), (1, 8)])
    assert tracker.failed_blocks("a") == ((1, 7), (1, 8), (0, 7))
    error = TransferError("group 1 did not arrive", failed_blocks=tracker.failed_blocks("a"))
    assert error.failed_blocks == ((1, 7), (1, 8), (0, 7))
    assert tracker.cancel("a") is True
    assert tracker.failed_blocks("a") == ()


def test_requests_expire_the_oldest_first():
    now = 100.0
    tracker = TransferTracker(1, timeout=10, clock=lambda: now)
    tracker.open("a")
    now = 105.0
    tracker.open("b")
    assert tracker.expire() == []
    assert tracker.expire(now=110.0) == ["a"]
    assert tracker.expire(now=200.0) == ["b"]
    assert tracker.ack("a", 0) is False
    assert tracker.late == 1
    tracker.open("a")  # a closed id may be opened again
    assert tracker.ack("a", 0) is True
    forever = TransferTracker(1)
    forever.open("a")
    assert forever.expire(now=1e30) == []


def test_the_oldest_makes_room_when_too_many_are_open():
    tracker = TransferTracker(1, max_entries=2)
    for request_id in "abc":
        tracker.open(request_id)
    assert len(tracker) == 2
    assert [tracker.ack(request_id, 0) for request_id in "abc"] == [False, True, True]
    assert tracker.late == 1


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        (0, {}),
        (-1, {}),
        ([], {}),
        (1, {"max_entries": 0}),
        (1, {"timeout": 0}),
        (1, {"timeout": -1}),
    ],
)
def test_nonsense_is_refused(expected, fields):
    with pytest.raises(ValueError, match=r"positive"):
        TransferTracker(expected, **fields)


@given(st.lists(st.tuples(st.sampled_from("oacf"), st.sampled_from("xyz"), st.integers(0, 2))))
def test_it_does_what_a_plain_model_does(steps):
    tracker = TransferTracker(2, max_entries=2)
    model: dict[str, set[int]] = {}
    failed: dict[str, set[int]] = {}
    seen: set[str] = set()
    late = 0
    for action, request_id, rank in steps:
        if action == "o" and request_id not in model:
            if len(model) == 2:
                oldest = next(iter(model))
                del model[oldest]
                failed.pop(oldest, None)
            model[request_id] = set()
            failed.pop(request_id, None)
            seen.add(request_id)
            tracker.open(request_id)
        elif action == "a":
            completes = False
            if request_id in model:
                model[request_id].add(rank)
                completes = len(model[request_id]) == 2
                if completes:
                    del model[request_id]
            else:
                # Three ids, two of them open at most: what was closed is never forgotten here.
                late += request_id in seen
            assert tracker.ack(request_id, rank) is completes
        elif action == "c":
            if request_id in model:
                failed.pop(request_id, None)
            assert tracker.cancel(request_id) is (model.pop(request_id, None) is not None)
        elif action == "f":
            tracker.failed(request_id, rank, [(rank, 1)])
            if request_id in model:
                failed.setdefault(request_id, set()).add(rank)
        # What failed can be asked for after a request has completed, until it is forgotten.
        told = set(tracker.failed_blocks(request_id))
        assert told == {(rank, 1) for rank in failed.get(request_id, ())} or (
            not told and request_id not in model
        )
        assert len(tracker) == len(model)
    assert tracker.late <= late
