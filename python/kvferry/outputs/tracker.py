"""Requests tracked until every rank has acknowledged them."""

from __future__ import annotations

import math
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvferry.outputs._integers import integer

__all__ = ["MAX_FAILED_BLOCKS", "TransferTracker"]

#: Failed blocks of one request: as many ids as a group of a request may have on the wire.
MAX_FAILED_BLOCKS = 4 << 20

_Blocks = dict[tuple[int, int], None]  # (group, block) pairs, each once, in the order of reports


class TransferTracker:
    """Know when every rank has acknowledged a request, whoever says it how often.

    Its state is bounded: by `max_entries` open requests, as many closed ones that are remembered,
    and `MAX_FAILED_BLOCKS` a request.

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
        Gives the time in seconds; it must not go back.

    Attributes
    ----------
    late
        Acknowledgements of requests that were gone already: completed, cancelled or expired, and
        among the last `max_entries` to go.

    Raises
    ------
    TypeError
        `expected` is neither an integer nor ranks, or `max_entries` is no integer.
    ValueError
        `expected`, `timeout` or `max_entries` is not positive.

    Examples
    --------
    >>> tracker = TransferTracker(expected=2)
    >>> tracker.open("a")
    >>> tracker.ack("a", rank=0), tracker.ack("a", rank=0), tracker.ack("a", rank=1)
    (False, False, True)
    >>> len(tracker)
    0
    >>> tracker.ack("a", rank=1), tracker.late
    (False, 1)
    """

    def __init__(
        self,
        expected: int | Iterable[int],
        *,
        timeout: float | None = None,
        max_entries: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks: frozenset[int] | None = None
        if isinstance(expected, Iterable):
            self._ranks = frozenset(integer("rank", rank) for rank in expected)
            self._expected = len(self._ranks)
        else:
            self._expected = integer("expected", expected)
        if self._expected < 1:
            raise ValueError(f"expected={expected!r} is not a positive number of ranks")
        self._max_entries = integer("max_entries", max_entries)
        if self._max_entries < 1:
            raise ValueError(f"max_entries={max_entries} is not positive")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout} is not positive")
        self._timeout, self._clock = timeout, clock
        # The ranks that have acknowledged each open request, in the order of opening.
        self._open: OrderedDict[str, set[int]] = OrderedDict()
        # Of open requests, where there is a timeout, in the same order and so of growing time.
        self._deadlines: OrderedDict[str, float] = OrderedDict()
        # Requests that were open once, so that what comes late is told from what never was.
        self._closed: OrderedDict[str, None] = OrderedDict()
        # Of open and of closed requests: who learns of completion asks for these afterwards.
        self._failed: dict[str, _Blocks] = {}
        self.late = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> None:
        """Start to wait for a request's acknowledgements.

        An open request stays as it is. A closed id may be opened again: nothing of what came
        before counts for it. Where `max_entries` are open, the oldest is cancelled.
        """
        # First of all, since the clock is the caller's: it may fail, and call this tracker.
        deadline = None if self._timeout is None else self._moment() + self._timeout
        if request_id in self._open:
            return
        if request_id in self._closed:
            del self._closed[request_id]
            self._failed.pop(request_id, None)
        if len(self._open) >= self._max_entries:
            self.cancel(next(iter(self._open)))
        if deadline is not None:
            self._deadlines[request_id] = deadline
        self._open[request_id] = set()

    def ack(self, request_id: str, rank: int) -> bool:
        """Take note that a rank is done with a request.

        Parameters
        ----------
        request_id
            A request; one that was never opened, or is closed, stays what it is.
        rank
            Who is done. Saying it again changes nothing.

        Returns
        -------
        bool
            Whether that completes the request, so `True` once; it is closed then.

        Raises
        ------
        TypeError
            `rank` is no integer.
        """
        rank = integer("rank", rank)
        acked = self._open.get(request_id)
        if acked is None:
            if request_id in self._closed:
                self.late += 1
            return False
        if self._ranks is not None and rank not in self._ranks:
            return False
        acked.add(rank)
        if len(acked) < self._expected:
            return False
        self._close(request_id)
        return True

    def cancel(self, request_id: str) -> bool:
        """Stop waiting for a request and forget its failed blocks; return whether it was open."""
        if request_id not in self._open:
            return False
        self._failed.pop(request_id, None)
        self._close(request_id)
        return True

    def expire(self, now: float | None = None) -> list[str]:
        """Close the requests whose time is up, and name them, the oldest first.

        Parameters
        ----------
        now
            Seconds of `clock`; `None`: what it says.

        Raises
        ------
        ValueError
            That is not a number; nothing is closed.

        Examples
        --------
        >>> tracker = TransferTracker(expected=2, timeout=30, clock=lambda: 100.0)
        >>> tracker.open("a")
        >>> tracker.expire(now=129.9), tracker.expire(now=130.0)
        ([], ['a'])
        """
        moment = self._moment(now)
        expired = []
        for request_id, deadline in self._deadlines.items():
            if deadline > moment:
                break
            expired.append(request_id)
        for request_id in expired:
            self._close(request_id)
        return expired

    def failed(self, request_id: str, rank: int, blocks: Iterable[tuple[int, int]]) -> None:
        """Take note that blocks of an open request did not arrive on a rank.

        That is no acknowledgement: a rank that is done acknowledges, whatever failed.

        Parameters
        ----------
        request_id
            A request; of one that is not open, nothing is noted.
        rank
            Where the blocks did not arrive.
        blocks
            ``(group, block id)`` pairs, as in `TransferError.failed_blocks`.

        Raises
        ------
        TypeError
            `rank`, or a group or block, is no integer; nothing is noted.
        ValueError
            The request would have more than `MAX_FAILED_BLOCKS`; nothing is noted.

        Examples
        --------
        >>> tracker = TransferTracker(expected=2)
        >>> tracker.open("a")
        >>> tracker.failed("a", rank=1, blocks=[(0, 7), (1, 7)])
        >>> tracker.ack("a", rank=0), tracker.ack("a", rank=1)
        (False, True)
        >>> tracker.failed_blocks("a")
        ((0, 7), (1, 7))
        """
        integer("rank", rank)
        acked = self._open.get(request_id)
        if acked is None:
            return
        index = operator.index
        named: _Blocks = {}
        for group, block in blocks:
            named[index(group), index(block)] = None
            if len(named) > MAX_FAILED_BLOCKS:
                raise _too_many_failed(request_id)
        # Whoever gives the blocks may meanwhile have closed the request, and opened it again.
        if not named or self._open.get(request_id) is not acked:
            return
        noted = self._failed.get(request_id, {})
        if len(noted) + sum(pair not in noted for pair in named) > MAX_FAILED_BLOCKS:
            raise _too_many_failed(request_id)
        noted.update(named)
        self._failed[request_id] = noted

    def failed_blocks(self, request_id: str) -> tuple[tuple[int, int], ...]:
        """Return the (group, block) pairs of a request that did not arrive, on any rank, each once.

        They can be asked for after the request has completed or expired, as long as it is among
        the last `max_entries` to go.
        """
        return tuple(self._failed.get(request_id, ()))

    def _moment(self, now: float | None = None) -> float:
        """Return a time in seconds, that of the clock where none is given."""
        moment = self._clock() if now is None else now
        if math.isnan(moment):  # it is neither before nor after a deadline
            raise ValueError("the time is not a number")
        return moment

    def _close(self, request_id: str) -> None:
        del self._open[request_id]
        if self._deadlines:
            del self._deadlines[request_id]
        self._closed[request_id] = None
        if len(self._closed) > self._max_entries:
            forgotten, _ = self._closed.popitem(last=False)
            self._failed.pop(forgotten, None)


def _too_many_failed(request_id: str) -> ValueError:
    return ValueError(f"request {request_id!r} has more than {MAX_FAILED_BLOCKS} failed blocks")
