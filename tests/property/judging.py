"""What the property tests share: caches made from scenarios, and the oracle's verdict on them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry import KVCache, Plan, Route
from kvferry.testing import (
    Scenario,
    Side,
    Slot,
    allocate,
    axes_handed_over,
    check_reference,
    fill_reference,
    poison,
    slots,
    snapshot,
)

EXAMPLES = int(os.environ.get("KVFERRY_EXAMPLES", "2000"))
# Even a quick run has some examples of everything.
LEAST_EXAMPLES = 20
# Rates are meaningful, and asserted, from this many examples on.
COUNTED_EXAMPLES = 2000
COLUMNS = ("source_tensor", "source_offset", "target_tensor", "target_offset", "length")


@dataclass
class Sources:
    """The source ranks that plans have read so far, filled and registered when first needed."""

    scenario: Scenario
    rng: random.Random
    tensors: dict[int, list[np.ndarray]] = field(default_factory=dict)
    caches: dict[int, KVCache] = field(default_factory=dict)
    before: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def need(self, ranks: Any) -> None:
        """Fill these ranks with patterns of their own."""
        side = self.scenario.source
        for rank in ranks:
            if rank not in self.caches:
                tensors = allocate(side, rank, self.rng)
                poison(tensors)
                fill_reference(
                    side.engine, rank, tensors, side.blocks,
                    first_token=side.first_token, mark_rank=True,
                )  # fmt: skip
                self.tensors[rank] = tensors
                self.caches[rank] = register(side, rank, tensors, self.rng)
                self.before[rank] = snapshot(tensors)

    def assert_unchanged(self) -> None:
        """Assert that reading has left every byte alone."""
        for rank, tensors in self.tensors.items():
            unchanged = zip(snapshot(tensors), self.before[rank], strict=True)
            assert all((now == then).all() for now, then in unchanged), f"source {rank} has changed"


def examples(parts: int) -> int:
    """Return a share of the examples that a run is told to have."""
    return max(LEAST_EXAMPLES, EXAMPLES // parts)


def route_of(scenario: Scenario) -> Route:
    return Route(*scenario.engines, allow_missing_layers=scenario.allow_missing_layers)


def some(ranks: int, rng: random.Random, count: int = 3) -> list[int]:
    """Return all ranks where they are few, else some of them, ascending."""
    return list(range(ranks)) if ranks <= count + 1 else sorted(rng.sample(range(ranks), count))


def as_handed_over(scenario: Scenario, rng: random.Random) -> tuple[Any, ...]:
    """Return the request with its lists in one of the forms that are accepted."""
    form = rng.choice((list, tuple, np.array, lambda ids: np.array(ids, np.int64)))
    as_form = [[form(ids) if ids else ids for ids in side] for side in scenario.request[:2]]
    return *as_form, scenario.tokens


def register(side: Side, rank: int, tensors: list[np.ndarray], rng: random.Random) -> KVCache:
    """Register tensors as a list or by name, in memory order or with their axes named."""
    declared = side.engine.tensor_slots(rank)
    slot_names = [slot.name for slot in declared]
    assert len(set(slot_names)) == len(slot_names)
    assert [Slot(s.group, tuple(s.layers), tuple(s.planes)) for s in declared] == slots(
        side.engine, rank
    )
    axes = None
    if rng.random() < 0.3:
        tensors, axes = axes_handed_over(side, rank, tensors, rng)
    handed: Any = tensors
    if rng.random() < 0.2:
        handed = dict(zip(slot_names, tensors, strict=True))
    return KVCache(side.engine, rank, handed, axes=axes)


def poisoned_target(
    scenario: Scenario, rank: int, rng: random.Random
) -> tuple[list[np.ndarray], KVCache, list[np.ndarray]]:
    """Return a target rank's tensors, their cache, and what they hold before a copy."""
    tensors = allocate(scenario.target, rank, rng)
    cache = register(scenario.target, rank, tensors, rng)
    poison(tensors)
    return tensors, cache, snapshot(tensors)


def judge_target(
    scenario: Scenario,
    rank: int,
    tensors: list[np.ndarray],
    before: list[np.ndarray],
    what: str,
) -> None:
    """Assert that what is due has come from the right rank, and all else is as before."""
    mismatch = check_reference(
        *scenario.engines, rank, tensors, before, *scenario.request, **scenario.firsts,
        mark_rank=True,
    )  # fmt: skip
    assert mismatch is None, f"{what}: {mismatch}"


def rows_of(descriptors: Any) -> np.ndarray:
    """Return descriptors as int64 [rows, 5], in their order."""
    return np.stack([np.asarray(getattr(descriptors, name)) for name in COLUMNS], axis=1)


def plans_for_targets(scenario: Scenario, route: Route, ranks: Any) -> dict[int, Plan]:
    return {rank: route.plan(rank, *scenario.request, **scenario.firsts) for rank in ranks}


def dense(side: Side, rank: int) -> list[np.ndarray]:
    """Return dense tensors of `num_blocks` blocks, else of the highest id plus two."""
    known = side.engine.num_blocks
    known = known if isinstance(known, tuple) else (known,) * len(side.blocks)
    counts = [
        count if count is not None else max([0, *(b for b in ids if b != side.null(g))]) + 2
        for g, (count, ids) in enumerate(zip(known, side.blocks, strict=True))
    ]
    return allocate(side, rank, random.Random(0), counts)
