"""Plans on tensors that are not where numpy can see them, judged by the same reference."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from judging import Sources, judge_target, poisoned_target, route_of

from kvferry import KVCache
from kvferry.testing import Scenario, apply_staged_descriptors

# Twins keep their distance from multiples of this, and with it which vectors fit.
ALIGNMENT = 256


class Place(Protocol):
    """Memory somewhere; what it gives out begins at a multiple of `ALIGNMENT`."""

    def hold(self, content: np.ndarray) -> Any:
        """Return memory that holds these bytes."""

    def read(self, memory: Any) -> np.ndarray:
        """Return its bytes, without waiting for any stream."""

    def tensor(
        self,
        memory: Any,
        offset_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item_bytes: int,
    ) -> Any:
        """Return a DLPack tensor in it; strides count items."""


class Twins:
    """Tensors in another place that lie there as numpy's do here: padded, interleaved, aliased."""

    def __init__(self, arrays: Sequence[np.ndarray], place: Place) -> None:
        self._place = place
        self._spans: list[tuple[np.ndarray, int, Any]] = []  # bytes here; where they begin there
        self.tensors: list[Any] = [None] * len(arrays)
        for begin, end, members in _spans(arrays):
            here = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
            lead = begin % ALIGNMENT
            content = np.zeros(-(-(lead + len(here)) // ALIGNMENT) * ALIGNMENT, np.uint8)
            content[lead : lead + len(here)] = here
            memory = place.hold(content)
            self._spans.append((here, lead, memory))
            for index in members:
                array = arrays[index]
                self.tensors[index] = place.tensor(
                    memory,
                    array.ctypes.data - begin + lead,
                    array.shape,
                    [stride // array.itemsize for stride in array.strides],
                    array.itemsize,
                )
        self._arrays = arrays  # keeps the memory that `_spans` sees

    def differ(self) -> bool:
        """Tell whether any byte is another one there."""
        return not all(np.array_equal(here, there) for here, there in self._pairs())

    def fetch(self) -> None:
        """Make the arrays here what their twins are."""
        for here, there in self._pairs():
            here[:] = there

    def _pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (here, self._place.read(memory)[lead : lead + len(here)])
            for here, lead, memory in self._spans
        ]


def _spans(arrays: Sequence[np.ndarray]) -> list[tuple[int, int, list[int]]]:
    """Return (begin, end, indices of arrays) of each stretch of memory that arrays share."""
    bounds = []
    for index, array in enumerate(arrays):
        steps = zip(array.shape, array.strides, strict=True)
        begin = array.ctypes.data
        bounds.append((begin, begin + sum((n - 1) * s for n, s in steps) + array.itemsize, index))
    spans: list[tuple[int, int, list[int]]] = []
    for begin, end, index in sorted(bounds):
        if spans and begin < spans[-1][1]:
            first, last, members = spans.pop()
            spans.append((first, max(last, end), [*members, index]))
        else:
            spans.append((begin, end, [index]))
    return spans


def judge_copy(
    scenario: Scenario,
    places: tuple[Place, Place],
    stream: int,
    wait: Callable[[], None],
    *,
    runs_late: bool = False,
) -> None:
    """Copy to one rank between two places, and judge every byte after `wait`.

    Where streams run late, nothing may have been written before.
    """
    case = _Case(scenario, places[1])
    from_ = {rank: Twins(case.sources.tensors[rank], places[0]) for rank in case.plan.source_ranks}
    case.plan.copy(
        [KVCache(scenario.engines[0], rank, twins.tensors) for rank, twins in from_.items()],
        case.cache,
        stream=stream,
    )
    assert not (runs_late and case.to.differ())
    wait()
    case.judge(f"{places} on a stream")
    assert not any(twins.differ() for twins in from_.values())


def judge_staged(
    scenario: Scenario, places: tuple[Place, Place], stream: int, wait: Callable[[], None]
) -> None:
    """Lay out for one rank what was staged in scratch memory, and judge every byte after `wait`."""
    case = _Case(scenario, places[1])
    scratches = []
    for source_rank in case.plan.source_ranks:
        staged = case.plan.staged(case.sources.caches[source_rank], case.cache)
        scratch = np.zeros(staged.scratch_bytes, np.uint8)
        apply_staged_descriptors(staged.descriptors, case.sources.tensors[source_rank], scratch)
        scratches.append(Twins([scratch], places[0]))
        staged.finish(scratches[-1].tensors[0], case.cache, stream=stream)
    wait()
    case.judge(f"staged in {places[0]}, for {places[1]}")
    assert not any(scratch.differ() for scratch in scratches)


class _Case:
    """A plan for one rank, the sources that it reads, and a target of which no byte is due yet."""

    def __init__(self, scenario: Scenario, place: Place) -> None:
        rng = random.Random(scenario.seed)
        self._scenario = scenario
        self._rank = rng.randrange(scenario.engines[1].num_ranks)
        self.plan = route_of(scenario).plan(self._rank, *scenario.request, **scenario.firsts)
        self.sources = Sources(scenario, rng)
        self.sources.need(self.plan.source_ranks)
        self._tensors, _, self._before = poisoned_target(scenario, self._rank, rng)
        self.to = Twins(self._tensors, place)
        self.cache = KVCache(scenario.engines[1], self._rank, self.to.tensors)

    def judge(self, what: str) -> None:
        self.to.fetch()
        judge_target(self._scenario, self._rank, self._tensors, self._before, what)
