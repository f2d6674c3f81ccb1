"""Workers' outputs and scheduled requests: vLLM's own records, its aggregator beside kvferry's."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved
from vllm.distributed.kv_transfer.kv_connector import utils as theirs
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.integrations import vllm as ours

requests = st.sets(st.sampled_from("abcd"), max_size=3)
small = st.integers(0, 3)
# What a worker says, in plain values: each aggregator gets objects of its own made from them, since
# vLLM's statistics and events take in what they are merged with.
reports = st.fixed_dictionaries(
    {},
    optional={
        "finished_sending": requests | st.none(),
        "finished_recving": requests | st.none(),
        "kv_connector_stats": st.none() | st.lists(small, max_size=2),
        "kv_connector_worker_meta": st.none() | st.dictionaries(small, st.just(1), max_size=2),
        "kv_cache_events": st.none() | st.lists(small, max_size=2),
        "invalid_block_ids": st.sets(small, max_size=2),
        "failed_recving": requests,
        "expected_finished_count": st.sampled_from([0, 0, 0, 1, 2, 4]),
    },
)
steps = st.lists(st.lists(st.none() | reports, min_size=3, max_size=3), min_size=1, max_size=12)


def outputs_of(step):
    """Make vLLM's outputs of one step; a worker that says nothing has no record."""
    outputs = []
    for report in step:
        record = None if report is None else KVConnectorOutput(**objects_of(report))
        outputs.append(ModelRunnerOutput([], {}, kv_connector_output=record))
    return outputs


def objects_of(report):
    made = {}
    for name, value in report.items():
        made[name] = set(value) if isinstance(value, set) else value
        if value is None:
            continue
        if name == "kv_connector_stats":
            made[name] = NixlKVConnectorStats()
            made[name].data["num_descriptors"] = list(value)
        elif name == "kv_connector_worker_meta":
            made[name] = OffloadingWorkerMetadata(dict(value))
        elif name == "kv_cache_events":
            made[name] = LMCacheKVEvents(1)
            made[name].add_events([BlockRemoved([block], None) for block in value])
    return made


def contents(record):
    """Return what a merged record says, events by what they hold."""
    told = {field.name: getattr(record, field.name) for field in fields(record)}
    events = told.pop("kv_cache_events")
    held = events and (sorted(map(repr, events.get_all_events())), events.get_number_of_workers())
    return {**told, "kv_cache_events": held}


@given(st.integers(1, 4), st.integers(0, 2), steps)
def test_aggregators_tell_the_same(expected, output_rank, steps):
    pair = theirs.KVOutputAggregator(expected), ours.KVOutputAggregator(expected)
    for step in steps:
        told = []
        for aggregator in pair:
            outputs = outputs_of(step)
            merged = aggregator.aggregate(outputs, output_rank)
            assert merged is outputs[output_rank]
            assert type(merged.kv_connector_output) is KVConnectorOutput or not any(step)
            told.append(contents(merged.kv_connector_output))
        assert told[1] == told[0]
        for count in ("_send_remaining_count", "_recv_remaining_count"):
            assert getattr(pair[1], count) == getattr(pair[0], count)


@given(requests, requests, requests)
def test_reports_beside_an_empty_output_are_kept(sent, failed, later):
    """The one difference: vLLM's own forgets them, and the request is never freed."""
    for module, is_kept in ((theirs, False), (ours, True)):
        aggregator = module.KVOutputAggregator(1)
        report = {"finished_sending": sent, "finished_recving": failed, "failed_recving": failed}
        (spoken,), (other,) = outputs_of([report]), outputs_of([{"finished_sending": later}])
        assert aggregator.aggregate([None, spoken]) is None
        merged = aggregator.aggregate([other]).kv_connector_output
        assert merged.finished_sending == ((sent if is_kept else set()) | later or None)
        assert merged.failed_recving == (failed if is_kept else set())


@pytest.mark.parametrize("count", [None, 0, 3])
def test_the_connector_says_how_many_reports_it_wants(count):
    class Connector:
        def get_finished_count(self):
            return count

    made = [module.KVOutputAggregator.from_connector(Connector(), 8) for module in (theirs, ours)]
    told = [aggregator.aggregate(outputs_of([None])) for aggregator in made]
    counts = [output.kv_connector_output.expected_finished_count for output in told]
    assert counts[0] == counts[1] == (count or 8)


block_ids = st.tuples(st.lists(small, max_size=3), st.lists(small, max_size=3))


@given(
    st.lists(st.tuples(st.text("nm", max_size=3), block_ids), max_size=4),
    st.lists(st.tuples(st.text("abc", max_size=3), st.none() | block_ids), max_size=4),
    st.sets(st.text("abc", max_size=3), max_size=4),
)
def test_scheduled_requests_are_read_alike(new, cached, resumed):
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(request_id, None, [], None, None, ids, 0, None) for request_id, ids in new
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request_id for request_id, _ in cached],
        resumed_req_ids=resumed,
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[ids for _, ids in cached],
        num_computed_tokens=[0] * len(cached),
        num_output_tokens=[0] * len(cached),
    )
    assert list(ours.yield_req_data(step)) == list(theirs.yield_req_data(step))
