"""Staged plans: long source runs into scratch memory, then one pass that lays them out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from judging import Sources, examples, judge_target, poisoned_target, route_of, some

from kvferry.testing import Scenario, apply_staged_descriptors, poison, snapshot
from kvferry.testing.strategies import scenarios


@settings(max_examples=examples(4))
@given(scenarios())
def test_two_steps_do_what_one_copy_does(scenario: Scenario) -> None:
    """Plain byte moves into scratch, then `finish`, leave the target as a direct copy does."""
    rng = random.Random(scenario.seed)
    route, sources = route_of(scenario), Sources(scenario, rng)
    for rank in some(route.target.num_ranks, rng, 2):
        plan = route.plan(rank, *scenario.request, **scenario.firsts)
        sources.need(plan.source_ranks)
        tensors, cache, before = poisoned_target(scenario, rank, rng)
        plan.copy([sources.caches[r] for r in plan.source_ranks], cache)
        direct = snapshot(tensors)
        poison(tensors)
        for source_rank in plan.source_ranks:
            _stage(plan, source_rank, sources, cache, rng)
        judge_target(scenario, rank, tensors, before, "staged")
        both = zip(direct, snapshot(tensors), strict=True)
        assert all((one == two).all() for one, two in both)
    sources.assert_unchanged()


def _stage(plan: Any, source_rank: int, sources: Sources, cache: Any, rng: random.Random) -> None:
    """Run both steps for one pair; the scratch may be larger than asked for."""
    ends = sources.caches[source_rank], cache
    staged = plan.staged(*ends)
    assert staged.scratch_bytes >= 1
    spare = rng.choice((0, 0, 13))
    memory = np.zeros(staged.scratch_bytes + spare, np.uint8)
    poison([memory])
    untouched = memory[staged.scratch_bytes :].copy()
    apply_staged_descriptors(
        staged.descriptors, sources.tensors[source_rank], memory[: staged.scratch_bytes]
    )
    direct = plan.descriptors(*ends)
    assert len(staged.descriptors) == len(staged.descriptors.length) <= len(direct)
    assert staged.descriptors.total_bytes == staged.descriptors.length.sum()
    staged.finish(memory, cache)
    assert (memory[staged.scratch_bytes :] == untouched).all()
    assert plan.recommend_staging(*ends, min_mean_bytes=1) is False
    assert isinstance(plan.recommend_staging(*ends), bool)
