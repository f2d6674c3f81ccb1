"""Whose part of a transfer is done: reports merged, and requests tracked until all have spoken.

Outputs, records and statistics are the serving engine's own, known here by their attributes only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KVConnectorOutput", "KVOutputAggregator", "TransferTracker", "yield_req_data"]

Failed = tuple[int, int]


@dataclass
class KVConnectorOutput:
    """What one worker, or all of them merged, say of one step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0


@dataclass
class _Learned:
    """What has been learned since the last record that was returned."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    stats: Any = None
    meta: Any = None
    events: Any = None


class KVOutputAggregator:
    """Merge what all workers of an engine say of one step into one record.

    A request counts as finished once as many reports as expected have come in, over any number of
    steps. Reports are counted without asking who sent them; `TransferTracker` asks.

    Parameters
    ----------
    expected_finished_count
        Reports that finish a request, until an output says otherwise.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> aggregator = KVOutputAggregator(expected_finished_count=2)
    >>> def report(*finished):
    ...     record = KVConnectorOutput(finished_sending=set(finished) or None)
    ...     return SimpleNamespace(kv_connector_output=record)
    >>> aggregator.aggregate([report("a"), report()]).kv_connector_output.finished_sending
    >>> aggregator.aggregate([report(), report("a")]).kv_connector_output.finished_sending
    {'a'}
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected_finished_count = expected_finished_count
        # Reports that are missing still, by request id; the field's tests read these two.
        self._send_remaining_count: dict[str, int] = {}
        self._recv_remaining_count: dict[str, int] = {}
        self._learned = _Learned()
        # Records are made as they come: of the class of the last one, with the fields that it has.
        self._example: Any = KVConnectorOutput()

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> KVOutputAggregator:
        """Expect what the connector's `get_finished_count()` says, or one report a worker."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """Merge one step's outputs into that of `output_rank`.

        Parameters
        ----------
        outputs
            One a worker; each has a `kv_connector_output`, which may be `None`.
        output_rank
            Whose output carries the merged record.

        Returns
        -------
        object or None
            That output itself; `None` where it is falsy, and then what this step taught is kept for
            the next output that is returned.

        Raises
        ------
        AssertionError
            An output is `None` beside a truthy one of `output_rank`, or the stats or events of two
            workers are of different types. Of the first, nothing has been counted.
        """
        carrier = outputs[output_rank]
        if carrier:
            assert all(output is not None for output in outputs), "an output is None"
        for output in outputs:
            record = getattr(output, "kv_connector_output", None)
            if record is not None:
                self._example = record
                self._learn(record)
        if not carrier:
            return None
        carrier.kv_connector_output = self._merged()
        return carrier

    def _learn(self, record: Any) -> None:
        expected = getattr(record, "expected_finished_count", 0)
        if expected > 0:
            self._expected_finished_count = expected
        learned = self._learned
        self._count(record.finished_sending, self._send_remaining_count, learned.finished_sending)
        self._count(record.finished_recving, self._recv_remaining_count, learned.finished_recving)
        learned.invalid_block_ids.update(record.invalid_block_ids or ())
        learned.stats = _accumulated(learned.stats, record.kv_connector_stats, same_type=True)
        meta = getattr(record, "kv_connector_worker_meta", None)
        learned.meta = _accumulated(learned.meta, meta, same_type=False)
        learned.events = _with_events(learned.events, getattr(record, "kv_cache_events", None))

    def _count(
        self, reported: Iterable[str] | None, remaining: dict[str, int], finished: set[str]
    ) -> None:
        for request_id in reported or ():
            missing = remaining.get(request_id, self._expected_finished_count) - 1
            if missing > 0:
                remaining[request_id] = missing
            else:
                remaining.pop(request_id, None)
                finished.add(request_id)

    def _merged(self) -> Any:
        learned, self._learned = self._learned, _Learned()
        fields = {
            "finished_sending": learned.finished_sending or None,
            "finished_recving": learned.finished_recving or None,
            "kv_connector_stats": learned.stats or None,
            "kv_cache_events": learned.events or None,
            "kv_connector_worker_meta": learned.meta or None,
            "invalid_block_ids": learned.invalid_block_ids,
            "expected_finished_count": self._expected_finished_count,
        }
        known = {name: value for name, value in fields.items() if hasattr(self._example, name)}
        return type(self._example)(**known)


def _accumulated(so_far: Any, more: Any, *, same_type: bool) -> Any:
    """Aggregate statistics or metadata; the first that there is takes in what follows."""
    if so_far is None:
        return more
    if not more:
        return so_far
    assert not same_type or type(so_far) is type(more), "statistics of different types"
    return so_far.aggregate(more)


def _with_events(so_far: Any, more: Any) -> Any:
    """Add one worker's events to those of the first that had any."""
    if so_far is None or not more:
        return more if so_far is None else so_far
    assert type(so_far) is type(more), "events of different types"
    so_far.add_events(more.get_all_events())
    so_far.increment_workers(1)
    return so_far


@dataclass
class _Open:
    """A request that not all ranks have acknowledged."""

    deadline: float | None
    acked: set[int] = field(default_factory=set)
    failed: dict[Failed, None] = field(default_factory=dict)


class TransferTracker:
    """Know when every rank has acknowledged a request, whoever says it how often.

    Parameters
    ----------
    expected
        Ranks that must acknowledge: their number, so that any so many different ones complete it,
        or the ranks themselves, and then no other rank counts.
    timeout
        Seconds after which an open request expires; `None`: never.
    max_entries
        Requests that may be open; opening another cancels the oldest.
    clock
        Gives the time in seconds.

    Attributes
    ----------
    late
        Acknowledgements of requests that were gone already.

    Examples
    --------
    >>> tracker = TransferTracker(expected=2)
    >>> tracker.open("a")
    >>> tracker.ack("a", rank=0), tracker.ack("a", rank=0), tracker.ack("a", rank=1)
    (False, False, True)
    >>> len(tracker)
    0
    """

    def __init__(
        self,
        expected: int | Iterable[int],
        *,
        timeout: float | None = None,
        max_entries: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ranks = None if isinstance(expected, int) else frozenset(expected)
        number = expected if isinstance(expected, int) else len(ranks or ())
        if number < 1:
            raise ValueError(f"expected={expected!r} is not a positive number of ranks")
        if max_entries < 1:
            raise ValueError(f"max_entries={max_entries} is not positive")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout} is not positive")
        self._number, self._ranks = number, ranks
        self._timeout, self._max_entries, self._clock = timeout, max_entries, clock
        # In the order in which they were opened, and so of their deadlines.
        self._open: OrderedDict[str, _Open] = OrderedDict()
        # Closed requests that were once open, so that what comes late is told from what never was.
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.late = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> None:
        """Start to wait for a request's acknowledgements.

        An open request stays as it is, a closed id may be opened again.
        """
        if request_id in self._open:
            return
        if len(self._open) == self._max_entries:
            self._close(next(iter(self._open)))
        self._closed.pop(request_id, None)
        deadline = None if self._timeout is None else self._clock() + self._timeout
        self._open[request_id] = _Open(deadline)

    def ack(self, request_id: str, rank: int) -> bool:
        """Take note that a rank is done; return whether that completes the request, once."""
        entry = self._open.get(request_id)
        if entry is None:
            self.late += request_id in self._closed
            return False
        if self._ranks is None or rank in self._ranks:
            entry.acked.add(rank)
        if len(entry.acked) < self._number:
            return False
        self._close(request_id)
        return True

    def cancel(self, request_id: str) -> bool:
        """Stop waiting for a request; return whether it was open."""
        if request_id not in self._open:
            return False
        self._close(request_id)
        return True

    def expire(self, now: float | None = None) -> list[str]:
        """Close the requests whose time is up, and name them, the oldest first."""
        moment = self._clock() if now is None else now
        expired = []
        for request_id, entry in self._open.items():
            if entry.deadline is None or entry.deadline > moment:
                break
            expired.append(request_id)
        for request_id in expired:
            self._close(request_id)
        return expired

    def failed(self, request_id: str, rank: int, blocks: Iterable[Failed]) -> None:
        """Take note that blocks of a request did not arrive on a rank: (group, block) pairs."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.failed.update(((int(group), int(block)), None) for group, block in blocks)

    def failed_blocks(self, request_id: str) -> tuple[Failed, ...]:
        """Return the (group, block) pairs of an open request that did not arrive, each once."""
        entry = self._open.get(request_id)
        return tuple(entry.failed) if entry is not None else ()

    def _close(self, request_id: str) -> None:
        del self._open[request_id]
        self._closed[request_id] = None
        if len(self._closed) > self._max_entries:
            self._closed.popitem(last=False)


def yield_req_data(scheduler_output: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield what a step schedules: request id, its new block ids a group, whether they replace.

    Parameters
    ----------
    scheduler_output
        The engine's, with `scheduled_new_reqs` and `scheduled_cached_reqs`.

    Yields
    ------
    tuple
        ``(request_id, new_block_id_groups, preempted)``: new requests first, with `False`, then
        those that go on, with whether they were resumed, so that their ids replace all earlier
        ones. The groups may be `None`.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    for index, (request_id, groups) in enumerate(
        zip(cached.req_ids, cached.new_block_ids, strict=True)
    ):
        if resumed_ids is not None:
            yield request_id, groups, request_id in resumed_ids
        else:
            yield request_id, groups, bool(cached.resumed_from_preemption[index])
