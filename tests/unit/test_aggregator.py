"""Workers' outputs merged into one: counts, accumulators, and what is kept for later."""

from __future__ import annotations

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
    events: list[str] = field(default_factory=list)
    workers: int = 1

    def add_events(self, events):
        self.events.extend(events)

    def get_all_events(self):
        return self.events

    def increment_workers(self, count):
        self.workers += count


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


def test_statistics_accumulate_from_the_first_that_is_there():
    aggregator = KVOutputAggregator(1)
    totals = [None, Total(0), Total(2), Total(0), None, Total(3)]
    outputs = [output(kv_connector_stats=t, kv_connector_worker_meta=t) for t in totals]
    merged = aggregator.aggregate(outputs).kv_connector_output
    assert merged.kv_connector_stats == merged.kv_connector_worker_meta == Total(5)
    empty = aggregator.aggregate([output(kv_connector_stats=Total(0))]).kv_connector_output
    assert empty.kv_connector_stats is None
    with pytest.raises(AssertionError):
        aggregator.aggregate([output(kv_connector_stats=x) for x in (Total(1), SimpleNamespace())])


def test_events_are_added_to_those_of_the_first_worker_that_has_any():
    first, second = Events(["a"]), Events(["b", "c"])
    aggregator = KVOutputAggregator(1)
    outputs = [output(kv_cache_events=events) for events in (None, first, None, second)]
    merged = aggregator.aggregate(outputs).kv_connector_output.kv_cache_events
    assert merged is first
    assert (merged.events, merged.workers) == (["a", "b", "c"], 2)
    with pytest.raises(AssertionError):
        aggregator.aggregate([output(kv_cache_events=x) for x in (Events(["a"]), Total(1))])


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
        assert count // expected - told >= 0 or told == count // expected
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
