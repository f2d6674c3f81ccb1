"""Requests tracked until every rank has acknowledged them."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count

import numpy as np
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


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.5, 2.0, "2", None, [2]])
def test_a_number_of_entries_is_an_integer(wrong):
    with pytest.raises(TypeError, match="max_entries"):
        TransferTracker(1, max_entries=wrong)


@pytest.mark.parametrize("wrong", [float("nan"), None, 1.0, "1", [1], (0, 1)])
def test_ranks_are_integers(wrong):
    tracker = TransferTracker(2)
    for request_id in ("open", "never opened"):
        if request_id == "open":
            tracker.open(request_id)
        with pytest.raises(TypeError, match="rank"):
            tracker.ack(request_id, wrong)
        with pytest.raises(TypeError, match="rank"):
            tracker.failed(request_id, wrong, [(0, 1)])
    with pytest.raises(TypeError, match="rank"):
        TransferTracker([0, wrong])
    assert not tracker.ack("open", 0)
    assert tracker.failed_blocks("open") == ()


def test_a_rank_is_one_whatever_integer_names_it():
    tracker = TransferTracker(2)
    tracker.open("a")
    assert not tracker.ack("a", np.int64(1))
    assert not tracker.ack("a", np.uint8(1))
    assert not tracker.ack("a", 1)
    assert tracker.ack("a", np.int32(0))
    named = TransferTracker(np.array([3, 1]))
    named.open("a")
    assert not named.ack("a", 3)
    assert named.ack("a", np.int64(1))


def test_65536_requests_may_be_open():
    tracker = TransferTracker(1)
    for number in range(65536):
        tracker.open(str(number))
    assert len(tracker) == 65536
    tracker.open("one more")
    assert len(tracker) == 65536
    assert (tracker.cancel("0"), tracker.cancel("1")) == (False, True)


def test_time_is_the_monotonic_clock_s(monkeypatch):
    defaults = inspect.signature(TransferTracker).parameters
    assert defaults["clock"].default is time.monotonic
    tracker = TransferTracker(1, timeout=1000)
    before = time.monotonic()
    tracker.open("a")
    after = time.monotonic()
    assert tracker.expire() == []
    assert tracker.expire(now=before + 999.99) == []
    assert tracker.expire(now=after + 1000) == ["a"]


def test_a_time_that_is_no_number_is_refused():
    now = 0.0
    tracker = TransferTracker(1, timeout=10, max_entries=1, clock=lambda: now)
    tracker.open("a")
    before = state_of(tracker)
    with pytest.raises(ValueError, match="time"):
        tracker.expire(now=math.nan)
    now = math.nan
    with pytest.raises(ValueError, match="time"):
        tracker.expire()
    with pytest.raises(ValueError, match="time"):
        tracker.open("b")
    assert state_of(tracker) == before
    with pytest.raises(ValueError, match="time"):
        TransferTracker(1).expire(now=math.nan)
    assert tracker.expire(now=math.inf) == ["a"]


def test_a_clock_that_fails_cancels_nothing():
    ticks = iter([1.0, 2.0])
    tracker = TransferTracker(1, timeout=10, max_entries=2, clock=lambda: next(ticks))
    for request_id in "ab":
        tracker.open(request_id)
    tracker.failed("a", 0, [(0, 1)])
    before = state_of(tracker)
    with pytest.raises(StopIteration):
        tracker.open("c")
    assert state_of(tracker) == before


def test_failed_blocks_are_told_after_a_request_is_gone():
    now = 0.0
    tracker = TransferTracker(1, timeout=10, max_entries=2, clock=lambda: now)
    for request_id in ("done", "expired"):
        tracker.open(request_id)
        tracker.failed(request_id, 0, [(0, 1), (1, 2), (0, 1)])
    assert tracker.ack("done", 0)
    assert tracker.expire(now=10.0) == ["expired"]
    for request_id in ("done", "expired"):
        assert tracker.failed_blocks(request_id) == ((0, 1), (1, 2))
        tracker.failed(request_id, 0, [(0, 9)])  # too late
        assert tracker.failed_blocks(request_id) == ((0, 1), (1, 2))
    # The next to go pushes the first out of what is remembered; opening forgets as well.
    tracker.open("next")
    tracker.cancel("next")
    assert tracker.failed_blocks("done") == ()
    assert tracker.failed_blocks("expired") == ((0, 1), (1, 2))
    tracker.open("expired")
    assert tracker.failed_blocks("expired") == ()


def test_what_is_forgotten_is_late_no_more():
    tracker = TransferTracker(1, max_entries=3)
    for request_id in "abcd":
        tracker.open(request_id)
        assert tracker.ack(request_id, 0)
    assert [tracker.ack(request_id, 0) for request_id in "abcd"] == [False] * 4
    assert tracker.late == 3


def test_a_request_that_closes_while_its_blocks_are_read_leaves_nothing():
    def closing(close):
        yield 0, 1
        close()
        yield 0, 2

    tracker = TransferTracker(1, max_entries=1)
    closes = [
        lambda: tracker.cancel("a"),
        lambda: tracker.ack("a", 0),
        lambda: tracker.open("b"),
        # Gone and forgotten; gone and open again, which is another life.
        lambda: [tracker.open(request_id) for request_id in "bcd"],
        lambda: [tracker.open(request_id) for request_id in "bca"],
    ]
    for close in closes:
        tracker.open("a")
        tracker.failed("a", 0, closing(close))
        assert tracker.failed_blocks("a") == ()
        assert tracker._failed == {}
    # Blocks that are told of meanwhile are kept.
    tracker.open("a")
    tracker.failed("a", 0, closing(lambda: tracker.failed("a", 1, [(0, 2), (0, 3)])))
    assert tracker.failed_blocks("a") == ((0, 2), (0, 3), (0, 1))


def test_failed_blocks_of_a_request_are_bounded(monkeypatch):
    monkeypatch.setattr("kvferry.outputs.tracker.MAX_FAILED_BLOCKS", 5)
    tracker = TransferTracker(1)
    tracker.open("a")
    for too_many in (range(6), count()):
        with pytest.raises(ValueError, match="'a' has more than 5 failed blocks"):
            tracker.failed("a", 0, ((0, block) for block in too_many))
        assert tracker.failed_blocks("a") == ()
    tracker.failed("a", 0, [(0, 1), (0, 2), (0, 3)])
    tracker.failed("a", 1, [(0, 3), (0, 4), (0, 5)])
    with pytest.raises(ValueError, match="failed blocks"):
        tracker.failed("a", 2, [(0, 1), (0, 6)])
    assert tracker.failed_blocks("a") == ((0, 1), (0, 2), (0, 3), (0, 4), (0, 5))


def state_of(tracker):
    """Return all that a tracker holds, in objects of its own."""
    return {name: deepcopy(value) for name, value in vars(tracker).items() if not callable(value)}


EXPECTED, MAX_ENTRIES, TIMEOUT = 2, 2, 10
# More ids than are remembered of open and of closed requests together.
IDS = "uvwxyz"
steps = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(IDS)),
    st.tuples(st.just("ack"), st.sampled_from(IDS), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.sampled_from(IDS)),
    st.tuples(
        st.just("failed"),
        st.sampled_from(IDS),
        st.integers(0, 2),
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=3),
    ),
    st.tuples(st.just("pass"), st.integers(0, TIMEOUT)),
    st.tuples(st.just("expire")),
)


@dataclass
class Life:
    """One life of a request, from one opening to the next."""

    request_id: str
    deadline: int
    acked: set[int] = field(default_factory=set)
    failed: list[tuple[int, int]] = field(default_factory=list)


class Model:
    """A tracker as its page says it, in plain lists."""

    def __init__(self):
        self.now = self.late = 0
        self.open: list[Life] = []
        self.closed: list[Life] = []

    def find(self, lives, request_id):
        return next((life for life in lives if life.request_id == request_id), None)

    def close(self, life):
        self.open.remove(life)
        self.closed = [*self.closed, life][-MAX_ENTRIES:]

    def do_open(self, request_id):
        if self.find(self.open, request_id):
            return
        self.closed = [life for life in self.closed if life.request_id != request_id]
        if len(self.open) == MAX_ENTRIES:
            self.do_cancel(self.open[0].request_id)
        self.open.append(Life(request_id, self.now + TIMEOUT))

    def do_ack(self, request_id, rank):
        life = self.find(self.open, request_id)
        if life is None:
            self.late += self.find(self.closed, request_id) is not None
            return False
        life.acked.add(rank)
        if len(life.acked) < EXPECTED:
            return False
        self.close(life)
        return True

    def do_cancel(self, request_id):
        life = self.find(self.open, request_id)
        if life is None:
            return False
        life.failed.clear()
        self.close(life)
        return True

    def do_failed(self, request_id, rank, blocks):
        life = self.find(self.open, request_id)
        if life is not None:
            life.failed += [pair for pair in dict.fromkeys(blocks) if pair not in life.failed]

    def do_pass(self, seconds):
        self.now += seconds

    def do_expire(self):
        expired = [life for life in self.open if life.deadline <= self.now]
        for life in expired:
            self.close(life)
        return [life.request_id for life in expired]

    def failed_blocks(self, request_id):
        life = self.find([*self.open, *self.closed], request_id)
        return tuple(life.failed) if life else ()


@given(st.lists(steps, max_size=40))
def test_it_does_what_a_plain_model_does(steps):
    model = Model()
    tracker = TransferTracker(
        EXPECTED, timeout=TIMEOUT, max_entries=MAX_ENTRIES, clock=lambda: model.now
    )
    for name, *arguments in steps:
        expected = getattr(model, f"do_{name}")(*arguments)
        if name != "pass":
            assert getattr(tracker, name)(*arguments) == expected
        assert (len(tracker), tracker.late) == (len(model.open), model.late)
        for request_id in IDS:
            assert tracker.failed_blocks(request_id) == model.failed_blocks(request_id)
        check_nothing_leaks(tracker, model)


def check_nothing_leaks(tracker, model):
    """Compare all that a tracker holds with what it must know: an entry more is a leak."""
    lives = [*model.open, *model.closed]
    known = {
        "_open": {life.request_id: life.acked for life in model.open},
        "_deadlines": {life.request_id: life.deadline for life in model.open},
        "_closed": {life.request_id: None for life in model.closed},
        "_failed": {life.request_id: dict.fromkeys(life.failed) for life in lives if life.failed},
    }
    held = {name: value for name, value in vars(tracker).items() if isinstance(value, Collection)}
    assert held == known
    for name in ("_open", "_deadlines", "_closed"):
        assert [*held[name]] == [*known[name]]
