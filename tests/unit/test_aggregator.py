"""Workers' outputs merged into one: counts, accumulators, and what is kept for later."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.outputs import KVConnectorOutput, KVOutputAggregator, yield_req_data


def output(sent=(), received=(), **fields):
    record = KVConnectorOutput(set(sent) or None, set(received) or None, **fields)
    return SimpleNamespace(kv_connector_output=record)


class Falsy(SimpleNamespace):
    def __bool__(self):
        return False


@dataclass
class Total:
    """Statistics that add up; falsy when they count nothing."""

    count: int

    def aggregate(self, other):
        return Total(self.count + other.count)

    def __bool__(self):
        return self.count != 0


@dataclass
class Events:
    """Events of one worker or more; falsy when there are none."""

    events: list[str] = field(default_factory=list)
    workers: int = 1

    def __bool__(self):
        return bool(self.events)

    def add_events(self, events):
        self.events.extend(events)

    def get_all_events(self):
        return self.events

    def increment_workers(self, count):
        self.workers += count


def state_of(aggregator):
    """Return all that an aggregator holds, in objects of its own."""
    return deepcopy(vars(aggregator))


@contextmanager
def refused(aggregator, error, **options):
    """Expect an error, and that nothing was counted, kept or forgotten."""
    before = state_of(aggregator)
    with pytest.raises(error, **options):
        yield
    assert state_of(aggregator) == before


def busy():
    """Return an aggregator of two reports that holds something of everything."""
    aggregator = KVOutputAggregator(2)
    one = {"sent": "ab", "received": "c", "invalid_block_ids": {7}, "failed_recving": {"c"}}
    parts = {"kv_connector_stats": Total(2), "kv_connector_worker_meta": Total(3)}
    assert aggregator.aggregate([None, output(**one, **parts), output("a")]) is None
    events = output(received="c", kv_cache_events=Events(["x"]))
    assert aggregator.aggregate([None, events]) is None
    return aggregator


def test_the_very_output_is_returned_with_a_record_of_its_own_class():
    @dataclass
    class TheirRecord:
        finished_sending: Any = None
        finished_recving: Any = None
        kv_connector_stats: Any = None
        invalid_block_ids: Any = None
        expected_finished_count: int = 0

    outputs = [SimpleNamespace(kv_connector_output=TheirRecord({"a"})) for _ in range(2)]
    merged = KVOutputAggregator(2).aggregate(outputs, output_rank=1)
    assert merged is outputs[1]
    assert merged.kv_connector_output == TheirRecord({"a"}, None, None, set(), 2)
    assert type(merged.kv_connector_output) is TheirRecord
    nothing = [SimpleNamespace(kv_connector_output=None)]
    record = KVOutputAggregator(1).aggregate(nothing).kv_connector_output
    assert record == KVConnectorOutput(expected_finished_count=1)


def test_reports_are_counted_down_over_calls():
    aggregator = KVOutputAggregator(3)
    merged = aggregator.aggregate([output(sent="ab"), output(sent="a", received="c"), output()])
    assert merged.kv_connector_output.finished_sending is None
    assert aggregator._send_remaining_count == {"a": 1, "b": 2}
    assert aggregator._recv_remaining_count == {"c": 2}
    merged = aggregator.aggregate([output(sent="a"), output(received="c"), output(received="c")])
    assert merged.kv_connector_output.finished_sending == {"a"}
    assert merged.kv_connector_output.finished_recving == {"c"}
    assert aggregator._send_remaining_count == {"b": 2}
    assert aggregator._recv_remaining_count == {}


def test_reports_beside_an_empty_output_are_kept():
    """The first worker has nothing to say in the step in which the second reports a request."""
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([None, output(sent="a")]) is None
    assert aggregator.aggregate([None, output(sent="a", invalid_block_ids={7})]) is None
    merged = aggregator.aggregate([output(), output()]).kv_connector_output
    assert merged.finished_sending == {"a"}
    assert merged.invalid_block_ids == {7}
    again = aggregator.aggregate([output(), output()]).kv_connector_output
    assert (again.finished_sending, again.invalid_block_ids) == (None, set())


def test_a_missing_output_is_an_assertion_before_anything_is_counted():
    aggregator = KVOutputAggregator(2)
    with pytest.raises(AssertionError):
        aggregator.aggregate([output(sent="a"), output(sent="a"), None])
    assert aggregator._send_remaining_count == {}
    falsy = Falsy(kv_connector_output=KVConnectorOutput({"a"}))
    assert aggregator.aggregate([falsy, None, output(sent="a")]) is None
    assert aggregator.aggregate([output()]).kv_connector_output.finished_sending == {"a"}
    # A falsy output that is there is merged like any other.
    merged = aggregator.aggregate(
        [output(sent="b"), Falsy(kv_connector_output=output("b").kv_connector_output)]
    )
    assert merged.kv_connector_output.finished_sending == {"b"}


def test_the_expected_count_changes_from_a_worker_on():
    aggregator = KVOutputAggregator(2)
    aggregator.aggregate([output(sent=["old"])])
    changed = [output(sent="x"), output(sent="y", expected_finished_count=1), output(sent="z")]
    merged = aggregator.aggregate(changed).kv_connector_output
    assert merged.finished_sending == {"y", "z"}
    assert merged.expected_finished_count == 1
    assert aggregator._send_remaining_count == {"old": 1, "x": 1}
    merged = aggregator.aggregate([output(sent=["old", "x"])]).kv_connector_output
    assert merged.finished_sending == {"old", "x"}


class Log:
    """Statistics that write down what they were merged with, empty ones too; falsy when told so."""

    def __init__(self, name, truth=True):
        self.names, self.truth = [name], truth

    def aggregate(self, other):
        self.names += other.names
        return self

    def __bool__(self):
        return self.truth


@pytest.mark.parametrize("kind", ["kv_connector_stats", "kv_connector_worker_meta"])
def test_the_first_that_is_there_accumulates_and_later_falsy_ones_are_skipped(kind):
    first = Log("first", truth=False)
    logs = [None, first, Log("a"), Log("falsy", truth=False), None, Log("b")]

    def merged(*logs):
        outputs = [output(**{kind: log}) for log in logs]
        return getattr(KVOutputAggregator(1).aggregate(outputs).kv_connector_output, kind)

    # The first one says what comes out, so a falsy one that took others in becomes None.
    assert merged(*logs) is None
    assert first.names == ["first", "a", "b"]
    totals = [None, Total(0), Total(2), Total(0), None, Total(3)]
    assert merged(*totals) == Total(5)
    assert merged(Total(0), None, Total(0)) is None
    assert merged(None, None) is None


@pytest.mark.parametrize("kind", ["kv_connector_stats", "kv_cache_events"])
def test_different_types_change_nothing(kind):
    """The fault lies in the last output, so that a check that comes late is seen."""
    kinds = {"kv_connector_stats": (Total, 2), "kv_cache_events": (Events, ["x"])}
    make, content = kinds[kind]
    aggregator = busy()
    other = SimpleNamespace(get_all_events=list)
    others = {"kv_connector_worker_meta": Total(1), "invalid_block_ids": {1}}
    outputs = [output("a", "c", **{kind: make(content)}, **others) for _ in range(2)]
    with refused(aggregator, AssertionError, match=rf"{kind} of different types: {make.__name__}"):
        aggregator.aggregate([*outputs, output("b", **{kind: other})])
    # Beside what was kept, too; and what no call has merged is as it was.
    with refused(aggregator, AssertionError, match=kind):
        aggregator.aggregate([None, output("a", **{kind: other})])
    assert [getattr(o.kv_connector_output, kind) for o in outputs] == [make(content)] * 2
    # A falsy one is skipped whatever its type.
    aggregator.aggregate([*outputs, output(**{kind: Log("falsy", truth=False)})])


def test_metadata_of_different_types_is_theirs_to_merge():
    aggregator = KVOutputAggregator(1)
    metas = [Total(1), SimpleNamespace(count=2)]
    merged = aggregator.aggregate([output(kv_connector_worker_meta=meta) for meta in metas])
    assert merged.kv_connector_output.kv_connector_worker_meta == Total(3)


def test_what_cannot_be_merged_is_no_report():
    class Stubborn(Total):
        def aggregate(self, other):
            raise RuntimeError("not today")

    aggregator = busy()
    outputs = [output("a", kv_connector_worker_meta=Stubborn(1)) for _ in range(2)]
    aggregator._meta = None
    with refused(aggregator, RuntimeError, match="not today"):
        aggregator.aggregate(outputs)


def test_events_are_added_to_those_of_the_first_worker_that_has_any():
    first, second = Events(["a"]), Events(["b", "c"])
    aggregator = KVOutputAggregator(1)
    several = (None, first, None, second, Events([]))
    outputs = [output(kv_cache_events=events) for events in several]
    merged = aggregator.aggregate(outputs).kv_connector_output.kv_cache_events
    assert merged is first
    # A worker without events is not counted among those who told any.
    assert (merged.events, merged.workers) == (["a", "b", "c"], 2)
    nothing = [output(kv_cache_events=Events([])) for _ in range(2)]
    assert aggregator.aggregate(nothing).kv_connector_output.kv_cache_events is None
    assert nothing[1].kv_connector_output.kv_cache_events.workers == 1
    # The first takes others in though it is empty.
    few = [output(kv_cache_events=Events(events)) for events in ([], ["d"])]
    merged = aggregator.aggregate(few).kv_connector_output.kv_cache_events
    assert (merged.events, merged.workers) == (["d"], 2)


def test_invalid_blocks_are_the_union_of_the_workers():
    aggregator = KVOutputAggregator(1)
    outputs = [output(invalid_block_ids=ids) for ids in ({1, 2}, set(), None, {2, 3})]
    assert aggregator.aggregate(outputs).kv_connector_output.invalid_block_ids == {1, 2, 3}
    assert aggregator.aggregate([output()]).kv_connector_output.invalid_block_ids == set()


def test_a_call_that_returns_nothing_keeps_all_that_it_learned():
    aggregator = busy()
    later = {
        "kv_connector_stats": Total(5),
        "kv_connector_worker_meta": Total(7),
        "kv_cache_events": Events(["y"]),
        "invalid_block_ids": {8},
    }
    assert aggregator.aggregate([Falsy(), output("b", **later)]) is None
    merged = aggregator.aggregate([output()]).kv_connector_output
    assert merged == KVConnectorOutput(
        finished_sending={"a", "b"},
        finished_recving={"c"},
        kv_connector_stats=Total(7),
        kv_connector_worker_meta=Total(10),
        kv_cache_events=Events(["x", "y"], workers=2),
        invalid_block_ids={7, 8},
        expected_finished_count=2,
        failed_recving={"c"},
    )
    again = aggregator.aggregate([output()]).kv_connector_output
    assert again == KVConnectorOutput(expected_finished_count=2)


class Unreadable:
    @property
    def kv_connector_output(self):
        return self.not_there_yet


@pytest.mark.parametrize("wrong", [SimpleNamespace(), Unreadable(), 1, "output"])
@pytest.mark.parametrize("first", [None, Falsy(), output("a")])
def test_only_a_falsy_output_may_lack_its_record(wrong, first):
    aggregator = busy()
    with refused(aggregator, AttributeError):
        aggregator.aggregate([first, output("a"), wrong])
    with refused(aggregator, AttributeError):
        aggregator.aggregate([wrong, output("a")])


@pytest.mark.parametrize("wrong", [5, "record", SimpleNamespace(), ["a"]])
def test_what_has_no_field_is_no_record(wrong):
    aggregator = busy()
    with refused(aggregator, TypeError, match="kv_connector_output"):
        aggregator.aggregate([output("a"), SimpleNamespace(kv_connector_output=wrong)])


def test_a_field_that_a_record_cannot_give_is_not_taken_for_none():
    class Unreadable:
        finished_recving = None

        @property
        def finished_sending(self):
            return self.not_there_yet

    aggregator = busy()
    with refused(aggregator, AttributeError, match="not_there_yet"):
        aggregator.aggregate([output("a"), SimpleNamespace(kv_connector_output=Unreadable())])


@pytest.mark.parametrize("falsy", [None, Falsy(), False, 0, (), {}])
def test_a_falsy_output_may_lack_its_record(falsy):
    aggregator = KVOutputAggregator(1)
    assert aggregator.aggregate([falsy, output("a")]) is None
    others = [] if falsy is None else [falsy]
    merged = aggregator.aggregate([output("b"), *others])
    assert merged.kv_connector_output.finished_sending == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in (
                "finished_sending",
                "finished_recving",
                "failed_recving",
                "invalid_block_ids",
            )
            for value in (5, 1.5, True, "req-1", b"req-1", bytearray(b"r"), object(), [["a"]])
        ),
        *(("expected_finished_count", value) for value in (1.5, "2", [2], float("nan"))),
    ],
)
@pytest.mark.parametrize("is_returned", [True, False])
def test_what_cannot_be_counted_is_refused_before_anything_is(name, value, is_returned):
    aggregator = busy()
    wrong = SimpleNamespace(kv_connector_output=KVConnectorOutput(**{name: value}))
    outputs = [output("a", "c", kv_connector_stats=Total(1)), wrong]
    with refused(aggregator, TypeError, match=name):
        aggregator.aggregate(outputs if is_returned else [None, *outputs])


@pytest.mark.parametrize("kind", [frozenset, list, tuple, dict.fromkeys, iter])
def test_reports_come_in_any_container(kind):
    aggregator = KVOutputAggregator(2)
    record = KVConnectorOutput(finished_sending=kind("ab"), invalid_block_ids=kind([3, 4]))
    merged = aggregator.aggregate([output("b"), SimpleNamespace(kv_connector_output=record)])
    assert merged.kv_connector_output.finished_sending == {"b"}
    assert merged.kv_connector_output.invalid_block_ids == {3, 4}
    assert aggregator._send_remaining_count == {"a": 1}


@dataclass
class Demanding(KVConnectorOutput):
    """A record that cannot be made of what kvferry knows."""

    needed: str = field(kw_only=True)


@dataclass(frozen=True)
class FrozenOutput:
    kv_connector_output: Any


EVERYTHING = KVConnectorOutput(
    {"a"}, {"c"}, Total(2), Events(["x"]), Total(3), {7}, 2, failed_recving={"c"}
)


def test_a_record_that_cannot_be_made_loses_nothing():
    aggregator = busy()
    demanding = SimpleNamespace(kv_connector_output=Demanding({"b"}, needed="this"))
    for _ in range(2):
        with pytest.raises(TypeError, match="needed"):
            aggregator.aggregate([demanding])
    # Counted once a call; neither the class nor the fault is remembered.
    merged = aggregator.aggregate([SimpleNamespace(kv_connector_output=None)]).kv_connector_output
    told = deepcopy(EVERYTHING)
    told.finished_sending = {"a", "b"}
    assert merged == told and type(merged) is KVConnectorOutput
    assert aggregator._send_remaining_count == {"b": 1}


def test_a_class_that_was_kept_for_later_is_not_asked_for_ever():
    aggregator = busy()
    demanding = SimpleNamespace(kv_connector_output=Demanding(needed="this"))
    assert aggregator.aggregate([None, demanding]) is None
    nothing = SimpleNamespace(kv_connector_output=None)
    with pytest.raises(TypeError, match="needed"):
        aggregator.aggregate([nothing])
    assert aggregator.aggregate([nothing]).kv_connector_output == EVERYTHING


def test_an_output_that_takes_no_record_loses_nothing():
    aggregator = busy()
    with pytest.raises(AttributeError):
        aggregator.aggregate([FrozenOutput(None)])
    with pytest.raises(AttributeError):
        aggregator.aggregate([FrozenOutput(KVConnectorOutput({"b"}))])
    merged = aggregator.aggregate([output("b")]).kv_connector_output
    told = deepcopy(EVERYTHING)
    told.finished_sending = {"a", "b"}
    assert merged == told


@pytest.mark.parametrize("expected", [0, -1, -(2**70)])
def test_at_least_one_report_is_expected(expected):
    with pytest.raises(ValueError, match=rf"expected_finished_count={expected} is not positive"):
        KVOutputAggregator(expected)


@pytest.mark.parametrize("expected", [None, 1.5, 2.0, "2", [2], float("nan")])
def test_the_expected_count_is_an_integer(expected):
    with pytest.raises(TypeError, match="expected_finished_count"):
        KVOutputAggregator(expected)


def test_what_came_first_may_be_of_a_narrower_type():
    class Narrower(Total):
        pass

    aggregator = KVOutputAggregator(1)
    narrower, wider = output(kv_connector_stats=Narrower(1)), output(kv_connector_stats=Total(2))
    with pytest.raises(AssertionError, match="Total and Narrower"):
        aggregator.aggregate([wider, narrower])
    merged = aggregator.aggregate([narrower, wider]).kv_connector_output
    assert merged.kv_connector_stats == Total(3)


def test_a_failed_receive_is_told_when_the_request_is_finished():
    aggregator = KVOutputAggregator(2)
    failing = output(received="a", failed_recving={"a", "b"})
    assert aggregator.aggregate([None, failing]) is None
    merged = aggregator.aggregate([output(), output(received="b")]).kv_connector_output
    assert (merged.finished_recving, merged.failed_recving) == (None, set())
    merged = aggregator.aggregate([output(), output(received="ac")]).kv_connector_output
    assert (merged.finished_recving, merged.failed_recving) == ({"a"}, {"a"})
    merged = aggregator.aggregate([output(received="bc"), output()]).kv_connector_output
    assert (merged.finished_recving, merged.failed_recving) == ({"b", "c"}, {"b"})
    merged = aggregator.aggregate([output(received="b"), output("b")]).kv_connector_output
    assert merged.failed_recving == set()


def test_fields_that_a_newer_class_adds_are_left_to_it():
    @dataclass
    class NewerRecord(KVConnectorOutput):
        added_later: int = 7

    outputs = [SimpleNamespace(kv_connector_output=NewerRecord({"a"}, added_later=1))]
    merged = KVOutputAggregator(1).aggregate(outputs).kv_connector_output
    assert merged == NewerRecord({"a"}, expected_finished_count=1, added_later=7)


def test_a_connector_may_say_how_many_reports_it_wants():
    for said, expected in ((None, 4), (0, 4), (2, 2)):
        connector = SimpleNamespace(get_finished_count=lambda said=said: said)
        aggregator = KVOutputAggregator.from_connector(connector, world_size=4)
        record = aggregator.aggregate([output()]).kv_connector_output
        assert record.expected_finished_count == expected


@given(
    st.integers(1, 4),
    st.lists(
        st.lists(st.none() | st.sets(st.sampled_from("abc")), min_size=3, max_size=3), max_size=9
    ),
)
def test_every_report_counts_once_whatever_the_first_worker_says(expected, steps):
    aggregator = KVOutputAggregator(expected)
    reports: dict[str, int] = {}
    finished: dict[str, int] = {}
    for step in steps:
        sets = [*step[:1], *(reported or set() for reported in step[1:])]
        outputs = [None if reported is None else output(sent=reported) for reported in sets]
        merged = aggregator.aggregate(outputs)
        for request_id in (request_id for reported in sets for request_id in reported or ()):
            reports[request_id] = reports.get(request_id, 0) + 1
        if merged is not None:
            for request_id in merged.kv_connector_output.finished_sending or ():
                finished[request_id] = finished.get(request_id, 0) + 1
    last = aggregator.aggregate([output()]).kv_connector_output.finished_sending or set()
    for request_id, count in reports.items():
        told = finished.get(request_id, 0) + (request_id in last)
        assert told <= count // expected
        assert bool(told) == (count >= expected)
        left = count % expected
        assert aggregator._send_remaining_count.get(request_id, expected) == expected - left


def test_scheduled_requests_are_told_apart():
    new = [SimpleNamespace(req_id="n", block_ids=([1, 2], [3]))]
    fields = {"req_ids": ["a", "b", "c"], "new_block_ids": [([4],), None, ([5],)]}
    expected = [
        ("n", ([1, 2], [3]), False),
        ("a", ([4],), False),
        ("b", None, False),
        ("c", ([5],), True),
    ]
    for resumed in ({"resumed_req_ids": {"c"}}, {"resumed_from_preemption": [False, False, True]}):
        cached = SimpleNamespace(**fields, **resumed)
        step = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        assert list(yield_req_data(step)) == expected


@pytest.mark.parametrize(
    ("req_ids", "others", "message"),
    [
        (
            "ab",
            {"new_block_ids": [None], "resumed_req_ids": set()},
            "2 req_ids but 1 new_block_ids",
        ),
        ("", {"new_block_ids": [None], "resumed_req_ids": {"a"}}, "0 req_ids but 1 new_block_ids"),
        (
            "a",
            {"new_block_ids": [None] * 3, "resumed_from_preemption": [True]},
            "1 req_ids but 3 new_block_ids",
        ),
        (
            "ab",
            {"new_block_ids": [None] * 2, "resumed_from_preemption": [True] * 3},
            "2 req_ids but 3 resumed_from_preemption",
        ),
        (
            "ab",
            {"new_block_ids": [None] * 2, "resumed_from_preemption": []},
            "2 req_ids but 0 resumed_from_preemption",
        ),
    ],
)
def test_lists_of_unequal_length_are_noticed_before_anything_is_yielded(req_ids, others, message):
    new = [SimpleNamespace(req_id="n", block_ids=([1],))]
    cached = SimpleNamespace(req_ids=list(req_ids), **others)
    step = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    with pytest.raises(ValueError, match=f"^{message}$"):
        next(yield_req_data(step))
