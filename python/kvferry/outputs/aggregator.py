"""Reports of all workers of an engine, merged into one record a step."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.outputs._integers import integer

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
_read_fields = operator.attrgetter(*_FIELDS)


class KVOutputAggregator:
    """Merge what all workers of an engine say of one step into one record.

    A request is finished once as many reports as expected have come in, over any number of steps.
    Reports are counted without asking who sent them; `TransferTracker` asks. A failed receive is
    told with the record in which the request is finished receiving.

    Parameters
    ----------
    expected_finished_count
        Reports that finish a request, until a worker's record says otherwise.

    Raises
    ------
    TypeError
        `expected_finished_count` is no integer.
    ValueError
        It is not positive: no request would ever be finished, or each at once.

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
        self._expected_finished_count = integer("expected_finished_count", expected_finished_count)
        if self._expected_finished_count < 1:
            raise ValueError(f"expected_finished_count={expected_finished_count} is not positive")
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
            two workers are of different types.
        AttributeError
            An output that is not falsy has no `kv_connector_output`, or a record has a field that
            it cannot give.
        TypeError
            A record has something else where requests, blocks or a count belong. A string is no
            set of requests.

        Notes
        -----
        All this is checked first: a call that raises one of these has changed nothing. Where the
        workers' own `aggregate` or `add_events` raises, no report has been counted either. Where
        the record's class or the returned output does not take what was merged, its error is
        passed on, the reports have been counted, and the next output that is returned tells them.
        """
        carrier = outputs[output_rank]
        is_returned = bool(carrier)
        records = []
        for output in outputs:
            try:
                record = output.kv_connector_output
            except AttributeError:
                if is_returned and output is None:
                    raise AssertionError(
                        f"one of {len(outputs)} outputs is None, that of rank {output_rank} is not"
                    ) from None
                if output:
                    raise
                record = None  # an output that is not there may be any falsy value
            if record:
                records.append(record)
        if records:
            self._learn(records)
        if not is_returned:
            return None
        carrier.kv_connector_output = self._merged()
        self._begin_anew()
        return carrier

    def _learn(self, records: list[Any]) -> None:
        """Take in the records of one step: first what can fail, then the counts."""
        record_class, taken = type(records[-1]), self._taken
        if record_class is not self._record_class:
            taken = _taken_fields(record_class)
        names_failed = taken is None or _NEWER_FIELD in taken
        # What there is of each, the first of which takes in the others.
        stats = [] if self._stats is None else [self._stats]
        meta = [] if self._meta is None else [self._meta]
        events = [] if self._events is None else [self._events]
        reports = []
        for record in records:
            try:
                sent, received, invalid, expected, more_stats, more_meta, more_events = (
                    _read_fields(record)
                )
                failed = record.failed_recving if names_failed else None
            except AttributeError:
                sent, received, invalid, expected, more_stats, more_meta, more_events, failed = (
                    _read_fewer_fields(record)
                )
            if sent or received or invalid or expected or failed:
                reports.append(
                    (
                        sent and _members("finished_sending", sent),
                        received and _members("finished_recving", received),
                        invalid and _members("invalid_block_ids", invalid),
                        expected and integer("expected_finished_count", expected),
                        failed and _members(_NEWER_FIELD, failed),
                    )
                )
            if more_stats is not None:
                _add("kv_connector_stats", stats, more_stats)
            if more_meta is not None and (more_meta or not meta):
                meta.append(more_meta)
            if more_events is not None:
                _add("kv_cache_events", events, more_events)

        merged_stats = _aggregated(stats) if stats else None
        merged_meta = _aggregated(meta) if meta else None
        merged_events = _with_all_events(events) if events else None
        self._stats, self._meta, self._events = merged_stats, merged_meta, merged_events
        self._record_class, self._taken = record_class, taken
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
        self, reported: Collection[str], remaining: dict[str, int], finished: set[str]
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
        """Return all that was learned as one record."""
        fields = {
            "finished_sending": self._sent or None,
            "finished_recving": self._received or None,
            "kv_connector_stats": self._stats or None,
            "kv_cache_events": self._events or None,
            "kv_connector_worker_meta": self._meta or None,
            "invalid_block_ids": self._invalid,
            "expected_finished_count": self._expected_finished_count,
            _NEWER_FIELD: self._failed & self._received,
        }
        if self._taken is not None:
            fields = {name: value for name, value in fields.items() if name in self._taken}
        try:
            return self._record_class(**fields)
        except BaseException:
            # A class that cannot be made like this is not used for steps without a record.
            self._record_class, self._taken = KVConnectorOutput, None
            raise

    def _begin_anew(self) -> None:
        """Forget what a record has told; its sets are its own from now on."""
        if self._failed:
            self._failed -= self._received
        if self._sent:
            self._sent = set()
        if self._received:
            self._received = set()
        self._invalid = set()
        self._stats = self._meta = self._events = None


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


def _read_fewer_fields(record: Any) -> list[Any]:
    """Return the fields of a record of a version that has not all; `None`: it has not this one."""
    absent = object()
    # What a class has and cannot give is a fault, not a field that is not there.
    values = [
        getattr(record, name) if hasattr(type(record), name) else getattr(record, name, absent)
        for name in (*_FIELDS, _NEWER_FIELD)
    ]
    if all(value is absent for value in values):
        raise TypeError(f"kv_connector_output={record!r} has no field of a record")
    return [None if value is absent else value for value in values]


def _members(name: str, reported: Any) -> Collection[Any]:
    """Return what a worker reports, once it is sure that it can be counted to the end."""
    if type(reported) is set:
        return reported
    if isinstance(reported, str | bytes | bytearray):
        raise TypeError(f"{name}={reported!r} is no set: its items would be counted one by one")
    try:
        members = [*reported]
        for member in members:
            hash(member)
    except TypeError as error:
        raise TypeError(f"{name}={reported!r} is no set: {error}") from None
    return members


def _add(what: str, parts: list[Any], more: Any) -> None:
    """Add one worker's statistics or events to those of the first, if there is anything in them."""
    if not parts:
        parts.append(more)
    elif more:
        # As the engines ask: what came first may be of a narrower type than what follows.
        if not isinstance(parts[0], type(more)):
            raise AssertionError(
                f"{what} of different types: {type(parts[0]).__name__} and {type(more).__name__}"
            )
        parts.append(more)


def _aggregated(parts: list[Any]) -> Any:
    """Return the first statistics or metadata with all others in them."""
    merged, *others = parts
    for more in others:
        merged = merged.aggregate(more)
    return merged


def _with_all_events(parts: list[Any]) -> Any:
    """Return the events of the first with those of all others added."""
    merged, *others = parts
    for more in others:
        merged.add_events(more.get_all_events())
        merged.increment_workers(1)
    return merged
