"""Reports of all workers of an engine, merged into one record a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

__all__ = ["KVConnectorOutput", "KVOutputAggregator"]


@dataclass
class KVConnectorOutput:
    """What one worker, or all of them merged, say of one step.

    Parameters
    ----------
    finished_sending, finished_recving
        Requests whose blocks have been sent or received; `None`: none.
    kv_connector_stats, kv_connector_worker_meta
        What the connector's workers measure and tell its scheduler side: `aggregate` merges two.
    kv_cache_events
        Events of the cache, with `add_events`, `get_all_events` and `increment_workers`.
    invalid_block_ids
        Blocks whose content could not be loaded.
    expected_finished_count
        Reports that finish a request from here on; 0: as before.
    failed_recving
        Requests of which a part could not be received. Merged: those among `finished_recving`.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0
    failed_recving: set[str] = field(default_factory=set)


_FIELDS = (
    "finished_sending",
    "finished_recving",
    "invalid_block_ids",
    "expected_finished_count",
    "kv_connector_stats",
    "kv_connector_worker_meta",
    "kv_cache_events",
)
# Records of older engines do not have it.
_NEWER_FIELD = "failed_recving"
_read_fields = attrgetter(*_FIELDS)


class KVOutputAggregator:
    """Merge what all workers of an engine say of one step into one record.

    A request is finished once as many reports as expected have come in, over any number of steps.
    Reports are counted without asking who sent them; `TransferTracker` asks. A failed receive is
    told with the record in which the request is finished receiving.

    Parameters
    ----------
    expected_finished_count
        Reports that finish a request, until a worker's record says otherwise.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> aggregator = KVOutputAggregator(expected_finished_count=2)
    >>> def output(*finished):
    ...     record = KVConnectorOutput(finished_sending=set(finished) or None)
    ...     return SimpleNamespace(kv_connector_output=record)
    >>> outputs = [output("a"), output()]
    >>> merged = aggregator.aggregate(outputs)
    >>> merged is outputs[0], merged.kv_connector_output.finished_sending
    (True, None)

    The output that is to carry the merged record is missing: what was learned is kept.

    >>> aggregator.aggregate([None, output("a")])
    >>> aggregator.aggregate([output(), output()]).kv_connector_output.finished_sending
    {'a'}
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected_finished_count = expected_finished_count
        # Reports that are missing still, by request id. Callers' tests read these two.
        self._send_remaining_count: dict[str, int] = {}
        self._recv_remaining_count: dict[str, int] = {}
        # What was learned since a record was last returned.
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        # Requests whose receiving failed somewhere, until they are finished.
        self._failed: set[str] = set()
        self._stats: Any = None
        self._meta: Any = None
        self._events: Any = None
        # The class of the records, and which of the fields it takes; `None`: all.
        self._record_class: type[Any] = KVConnectorOutput
        self._taken: frozenset[str] | None = None

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> KVOutputAggregator:
        """Expect what the connector's `get_finished_count()` says, or one report a worker.

        Examples
        --------
        >>> class Connector:
        ...     def get_finished_count(self):
        ...         return None
        >>> aggregator = KVOutputAggregator.from_connector(Connector(), world_size=4)
        >>> aggregator._expected_finished_count
        4
        """
        return cls(connector.get_finished_count() or world_size)

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """Merge one step's outputs into that of `output_rank`.

        Parameters
        ----------
        outputs
            One a worker; the record of each is its `kv_connector_output`, which may be `None`.
        output_rank
            Index of the output that carries the merged record.

        Returns
        -------
        object or None
            That output itself, its `kv_connector_output` replaced by a record of the workers' own
            class. `None` where it is falsy: what this step taught is then kept for the next output
            that is returned.

        Raises
        ------
        AssertionError
            An output is `None` where that of `output_rank` is not falsy, or the stats or events of
            two workers are of different types. No report has been counted then. Of what the stats,
            metadata and events hold together nothing is kept, since they may be half merged.
        """
        carrier = outputs[output_rank]
        is_returned = bool(carrier)
        records = []
        for output in outputs:
            try:
                record = output.kv_connector_output
            except AttributeError:  # an output that is not there may be any falsy value
                if is_returned and output is None:
                    raise AssertionError(
                        f"one of {len(outputs)} outputs is None, that of rank {output_rank} is not"
                    ) from None
                record = None
            if record:
                records.append(record)
        if records:
            self._learn(records)
        if not is_returned:
            return None
        carrier.kv_connector_output = self._merged()
        return carrier

    def _learn(self, records: list[Any]) -> None:
        """Take in the records of one step: first what can fail, then the counts."""
        record_class = type(records[-1])
        if record_class is not self._record_class:
            self._record_class, self._taken = record_class, _taken_fields(record_class)
        stats, meta, events = self._stats, self._meta, self._events
        self._stats = self._meta = self._events = None
        reports = []
        names_failed = self._taken is None or _NEWER_FIELD in self._taken
        for record in records:
            try:
                sent, received, invalid, expected, more_stats, more_meta, more_events = (
                    _read_fields(record)
                )
                failed = record.failed_recving if names_failed else None
            except AttributeError:  # a record of a version that has fewer fields
                sent, received, invalid, expected, more_stats, more_meta, more_events, failed = (
                    getattr(record, name, None) for name in (*_FIELDS, _NEWER_FIELD)
                )
            if sent or received or invalid or expected or failed:
                reports.append((sent, received, invalid, expected, failed))
            if more_stats is not None:
                stats = _accumulated("kv_connector_stats", stats, more_stats)
            if more_meta is not None:
                if meta is None:
                    meta = more_meta
                elif more_meta:
                    meta = meta.aggregate(more_meta)
            if more_events is not None:
                events = _with_events(events, more_events)
        self._stats, self._meta, self._events = stats, meta, events

        for sent, received, invalid, expected, failed in reports:
            if expected and expected > 0:
                self._expected_finished_count = expected
            if sent:
                self._count(sent, self._send_remaining_count, self._sent)
            if received:
                self._count(received, self._recv_remaining_count, self._received)
            if invalid:
                self._invalid.update(invalid)
            if failed:
                self._failed.update(failed)

    def _count(
        self, reported: Iterable[str], remaining: dict[str, int], finished: set[str]
    ) -> None:
        expected = self._expected_finished_count
        for request_id in reported:
            missing = remaining.get(request_id, expected) - 1
            if missing > 0:
                remaining[request_id] = missing
            else:
                remaining.pop(request_id, None)
                finished.add(request_id)

    def _merged(self) -> Any:
        """Return all that was learned as one record, and begin anew."""
        failed = self._failed & self._received
        fields = {
            "finished_sending": self._sent or None,
            "finished_recving": self._received or None,
            "kv_connector_stats": self._stats or None,
            "kv_cache_events": self._events or None,
            "kv_connector_worker_meta": self._meta or None,
            "invalid_block_ids": self._invalid,
            "expected_finished_count": self._expected_finished_count,
            _NEWER_FIELD: failed,
        }
        # The record owns its sets from now on.
        if self._sent:
            self._sent = set()
        if self._received:
            self._received = set()
        self._invalid = set()
        self._failed -= failed
        self._stats = self._meta = self._events = None
        if self._taken is not None:
            fields = {name: value for name, value in fields.items() if name in self._taken}
        return self._record_class(**fields)


def _taken_fields(record_class: type[Any]) -> frozenset[str] | None:
    """Return the fields that a class of records is made with; `None`: all of them."""
    try:
        parameters = inspect.signature(record_class).parameters.values()
    except ValueError:  # `SimpleNamespace` and others that take what they are given
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    # Fields that are not known here are left at what the class gives them.
    known = {*_FIELDS, _NEWER_FIELD}
    taken = known.intersection(parameter.name for parameter in parameters)
    return None if taken == known else frozenset(taken)


def _accumulated(what: str, so_far: Any, more: Any) -> Any:
    """Aggregate statistics: the first that there are take in what follows."""
    if so_far is None:
        return more
    if not more:
        return so_far
    _check_types(what, so_far, more)
    return so_far.aggregate(more)


def _with_events(so_far: Any, more: Any) -> Any:
    """Add one worker's events to those of the first."""
    if so_far is None:
        return more
    if not more:
        return so_far
    _check_types("kv_cache_events", so_far, more)
    so_far.add_events(more.get_all_events())
    so_far.increment_workers(1)
    return so_far


def _check_types(what: str, so_far: Any, more: Any) -> None:
    # As the engines ask: what came first may be of a narrower type than what follows.
    if not isinstance(so_far, type(more)):
        raise AssertionError(
            f"{what} of different types: {type(so_far).__name__} and {type(more).__name__}"
        )
