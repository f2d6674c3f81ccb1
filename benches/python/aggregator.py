"""Time of `KVOutputAggregator.aggregate` beside what serving engines run, in plain Python.

16 workers report, and 10,000 requests are in flight: told by the first worker, not yet by the
last. `busy` is a step in which each worker names 50 requests, `idle` one in which none has
anything to say. `the field's` is the algorithm of the engines, which keeps nothing of a step whose
first output is empty and checks nothing before it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _measure import medians, print_heading, print_table

from kvferry.outputs import KVConnectorOutput, KVOutputAggregator

WORKERS = 16
IN_FLIGHT = 10_000
REPORTS_A_STEP = 50
# Twice what is in flight: every id is finished before it is used again.
REQUESTS = [f"cmpl-{number:032x}" for number in range(2 * IN_FLIGHT)]
STEPS = len(REQUESTS) // REPORTS_A_STEP
ROUNDS = 31


@dataclass
class Output:
    """What a worker returns of a step."""

    kv_connector_output: Any


class PlainAggregator:
    """Count down in one pass over the workers."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._send_remaining_count: dict[str, int] = {}
        self._recv_remaining_count: dict[str, int] = {}
        self.failed: set[str] = set()

    def aggregate(self, outputs: list[Output], output_rank: int = 0) -> Output | None:
        """Merge one step's outputs into that of `output_rank`."""
        if not outputs[output_rank]:
            return None

        def count(named: set[str] | None, missing: dict[str, int], done: set[str]) -> None:
            for request_id in named or ():
                left = missing.get(request_id, self.expected) - 1
                missing[request_id] = left
                if left == 0:
                    done.add(request_id)
                    del missing[request_id]

        sent: set[str] = set()
        received: set[str] = set()
        invalid: set[int] = set()
        stats = meta = events = None
        for output in outputs:
            assert output is not None
            record = output.kv_connector_output
            if not record:
                continue
            if record.expected_finished_count > 0:
                self.expected = record.expected_finished_count
            count(record.finished_sending, self._send_remaining_count, sent)
            count(record.finished_recving, self._recv_remaining_count, received)
            if stats is None:
                stats = record.kv_connector_stats
            elif more := record.kv_connector_stats:
                assert isinstance(stats, type(more))
                stats = stats.aggregate(more)
            if meta is None:
                meta = record.kv_connector_worker_meta
            elif more := record.kv_connector_worker_meta:
                meta = meta.aggregate(more)
            if events is None:
                events = record.kv_cache_events
            elif more := record.kv_cache_events:
                assert isinstance(events, type(more))
                events.add_events(more.get_all_events())
                events.increment_workers(1)
            invalid |= record.invalid_block_ids
            self.failed |= record.failed_recving
        failed = self.failed & received
        self.failed -= failed
        carrier = outputs[output_rank]
        carrier.kv_connector_output = KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            kv_connector_stats=stats or None,
            kv_cache_events=events or None,
            kv_connector_worker_meta=meta or None,
            invalid_block_ids=invalid,
            expected_finished_count=self.expected,
            failed_recving=failed,
        )
        return carrier


Aggregator = KVOutputAggregator | PlainAggregator


def main() -> None:
    begin = [[Output(named(s, w, oldest=0)) for w in range(WORKERS)] for s in range(STEPS)]
    busy = [[Output(named(s, w)) for w in range(WORKERS)] for s in range(STEPS)]
    idle = [[Output(KVConnectorOutput()) for _ in range(WORKERS)] for _ in range(STEPS)]
    rows = []
    for name, steps in (("busy", busy), ("idle", idle)):
        aggregators = (PlainAggregator(WORKERS), KVOutputAggregator(WORKERS))
        contestants = {
            type(aggregator).__name__: stepper(aggregator, begin, steps)
            for aggregator in aggregators
        }
        seconds = medians(contestants, rounds=ROUNDS)
        for aggregator in aggregators:
            assert len(aggregator._send_remaining_count) == IN_FLIGHT
        field, ours = (seconds[who] / len(steps) * 1e6 for who in contestants)
        rows.append([name, f"{field:.1f}", f"{ours:.1f}", f"{ours / field:.2f}"])
    note = f"One step of {WORKERS} workers, {IN_FLIGHT:,} requests in flight, medians of {ROUNDS}"
    print_heading("Aggregation", note)
    print_table(["", "the field's, us", "kvferry, us", "ratio"], rows)


def named(step: int, worker: int, *, oldest: int = -IN_FLIGHT) -> KVConnectorOutput:
    """Return what a worker reports: the requests of the first one, as much later as it lags."""
    begin = step * REPORTS_A_STEP - IN_FLIGHT * worker // (WORKERS - 1)
    places = range(max(begin, oldest), begin + REPORTS_A_STEP)
    return KVConnectorOutput({REQUESTS[place % len(REQUESTS)] for place in places} or None)


def stepper(
    aggregator: Aggregator, begin: list[list[Output]], steps: list[list[Output]]
) -> Callable[[], None]:
    """Return what runs all steps; as many requests are in flight before as after."""

    def run(steps: list[list[Output]] = steps) -> None:
        for outputs in steps:
            first = outputs[0]
            own = first.kv_connector_output
            aggregator.aggregate(outputs)
            first.kv_connector_output = own

    run(begin)
    return run


if __name__ == "__main__":
    main()
