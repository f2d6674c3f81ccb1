"""Push plans: the same pairs, bytes and descriptors as the pull plans of all targets together."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
from hypothesis import given, settings
from judging import (
    Sources,
    examples,
    judge_target,
    plans_for_targets,
    poisoned_target,
    route_of,
    rows_of,
)

from kvferry.testing import Scenario, expected_push_bytes
from kvferry.testing.strategies import scenarios

# Descriptors are compared for so many rank pairs of an example, numbers for all.
COMPARED_PAIRS = 6


@settings(max_examples=examples(4))
@given(scenarios())
def test_pull_plans_over_all_targets_are_push_plans_over_all_sources(scenario: Scenario) -> None:
    """Whoever plans, the same pairs move the same bytes between the same places."""
    rng = random.Random(scenario.seed)
    route = route_of(scenario)
    pulls = plans_for_targets(scenario, route, range(route.target.num_ranks))
    pushes = {
        rank: route.plan_push(rank, *scenario.request, **scenario.firsts)
        for rank in range(route.source.num_ranks)
    }
    pulled = list(chain.from_iterable(plan.pairs for plan in pulls.values()))
    pushed = list(chain.from_iterable(plan.pairs for plan in pushes.values()))
    assert len(set(pulled)) == len(pulled) and len(set(pushed)) == len(pushed)
    assert set(pulled) == set(pushed)
    assert sum(p.num_bytes for p in pulls.values()) == sum(p.num_bytes for p in pushes.values())
    for rank, plan in pushes.items():
        assert list(plan.source_ranks) == ([rank] if plan.pairs else [])
        assert list(plan.target_ranks) == sorted(target for _, target in plan.pairs)

    sources = Sources(scenario, rng)
    for source_rank, target_rank in rng.sample(pulled, min(len(pulled), COMPARED_PAIRS)):
        sources.need([source_rank])
        ends = sources.caches[source_rank], poisoned_target(scenario, target_rank, rng)[1]
        rows = rows_of(pulls[target_rank].descriptors(*ends))
        assert len(rows)
        assert np.array_equal(rows, rows_of(pushes[source_rank].descriptors(*ends)))


@settings(max_examples=examples(10))
@given(scenarios())
def test_pushes_of_all_sources_fill_a_target(scenario: Scenario) -> None:
    """One target rank gets all that is due from the sources that push to it, and nothing else."""
    rng = random.Random(scenario.seed)
    route, sources = route_of(scenario), Sources(scenario, rng)
    rank = rng.randrange(route.target.num_ranks)
    tensors, cache, before = poisoned_target(scenario, rank, rng)
    others: dict[int, object] = {rank: cache}
    for source_rank in range(route.source.num_ranks):
        plan = route.plan_push(source_rank, *scenario.request, **scenario.firsts)
        if rank not in plan.target_ranks:
            continue
        if source_rank == plan.source_ranks[0] and len(plan.target_ranks) <= 4:
            payload = expected_push_bytes(
                *scenario.engines, source_rank, *scenario.request, **scenario.firsts
            )
            assert list(payload) == list(plan.target_ranks)
            assert sum(payload.values()) == plan.num_bytes
        for target_rank in plan.target_ranks:
            if target_rank not in others:
                others[target_rank] = poisoned_target(scenario, target_rank, rng)[1]
        sources.need([source_rank])
        plan.copy(sources.caches[source_rank], [others[r] for r in plan.target_ranks])
    judge_target(scenario, rank, tensors, before, "push")
    sources.assert_unchanged()
