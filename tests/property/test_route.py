"""Plans between random pairs of engines, each judged byte by byte by the reference."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from judging import (
    COLUMNS,
    COUNTED_EXAMPLES,
    EXAMPLES,
    Sources,
    as_handed_over,
    dense,
    judge_target,
    poisoned_target,
    route_of,
    some,
)

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, errors
from kvferry.testing import (
    Scenario,
    apply_descriptors,
    check_reference,
    expected_bytes,
    expected_error,
    expected_pairs,
    fill_reference,
    poison,
    readers,
    snapshot,
)
from kvferry.testing.strategies import scenarios

HARD_CLASSES = (
    "non-divisible TP",
    "replicas",
    "non-dividing block sizes",
    "partial tail",
    "differing first tokens",
    "null target blocks",
    "active window",
    "latent",
    "state",
    "mixed kinds",
    "parallel hybrid",
    "PP",
    "uneven stages",
    "CP",
    "different CP on both sides",
    "physical blocks",
    "several tokens a slot",
)


def test_plans_move_exactly_what_is_due() -> None:
    """Copies, descriptors and numbers of every plan are what the contract's text says."""
    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(scenarios())
    def judge(scenario: Scenario) -> None:
        seen["examples"] += 1
        seen.update(scenario.classes)
        _judge(scenario)

    judge()
    print(", ".join(f"{name}: {seen[name]}" for name in ("examples", *HARD_CLASSES)))
    if EXAMPLES >= COUNTED_EXAMPLES:
        assert seen["examples"] >= COUNTED_EXAMPLES
        for name in HARD_CLASSES:
            assert seen[name] >= 0.03 * seen["examples"], f"only {seen[name]} examples of {name}"


def _judge(scenario: Scenario) -> None:
    source, target = scenario.engines
    assert not expected_error(*scenario.engines, *scenario.request, *scenario.firsts.values())
    route = route_of(scenario)
    rng = random.Random(scenario.seed)
    for source_rank in rng.sample(range(source.num_ranks), min(source.num_ranks, 4)):
        assert tuple(route.readers(source_rank)) == readers(source, target, source_rank)

    sources = Sources(scenario, rng)
    for rank in some(target.num_ranks, rng, 2):
        plan = route.plan(rank, *as_handed_over(scenario, rng), **scenario.firsts)
        payload = _judge_numbers(scenario, rank, plan)
        sources.need(plan.source_ranks)
        _judge_bytes(scenario, rank, plan, payload, sources)
        if rng.random() < 0.2:
            _judge_explanation(scenario, rank, plan)
    sources.assert_unchanged()


def _judge_numbers(scenario: Scenario, rank: int, plan: Any) -> dict[int, int]:
    """Compare what a plan says about itself before any tensor is known; return its payload."""
    request = (*scenario.engines, rank, *scenario.request)
    pairs, notify_only = expected_pairs(*request, **scenario.firsts)
    assert sorted(tuple(pair) for pair in plan.pairs) == sorted(pairs)
    assert list(plan.source_ranks) == sorted(source_rank for source_rank, _ in pairs)
    assert list(plan.target_ranks) == ([rank] if pairs else [])
    assert sorted(plan.notify_only) == sorted(notify_only)
    payload = expected_bytes(*request, **scenario.firsts)
    assert plan.num_bytes == sum(payload.values())
    return payload


def _judge_bytes(
    scenario: Scenario, rank: int, plan: Any, payload: dict[int, int], sources: Sources
) -> None:
    """Copy, then do the same by descriptors, and judge every byte of the target both times."""
    rng = sources.rng
    tensors, cache, before = poisoned_target(scenario, rank, rng)
    caches = list(sources.caches.values())
    rng.shuffle(caches)
    if plan.pairs:
        first = plan.source_ranks[0]
        without_first = [end for end in caches if end.rank != first]
        with pytest.raises(ValueError, match=str(first)):
            plan.copy(without_first, cache)
    plan.copy(caches[0] if len(caches) == 1 else caches, cache, threads=rng.choice((None, 1, 2)))
    judge_target(scenario, rank, tensors, before, "copy")

    poison(tensors)
    described = rng.random() < 0.5
    for source_rank in plan.source_ranks:
        ends = (sources.caches[source_rank], cache)
        rows = plan.descriptors(*(end.describe() if described else end for end in ends))
        _judge_summary(rows)
        assert rows.total_bytes == payload[source_rank]
        apply_descriptors(rows, sources.tensors[source_rank], tensors)
        again = plan.descriptors(*ends)
        for name in COLUMNS:
            assert np.array_equal(getattr(rows, name), getattr(again, name))
    judge_target(scenario, rank, tensors, before, "descriptors")


def _judge_summary(rows: Any) -> None:
    lengths = rows.length
    assert len(rows) == len(lengths)
    assert rows.total_bytes == lengths.sum()
    assert rows.min_bytes == lengths.min(initial=rows.total_bytes)
    assert rows.mean_bytes == pytest.approx(lengths.mean() if len(lengths) else 0)


def _judge_explanation(scenario: Scenario, rank: int, plan: Any) -> None:
    """Compare the explanation with descriptors on the dense tensors that it assumes."""
    target = KVCache(scenario.target.engine, rank, dense(scenario.target, rank))
    fragments = 0
    caches = []
    for source_rank in plan.source_ranks:
        tensors = dense(scenario.source, source_rank)
        caches.append(KVCache(scenario.source.engine, source_rank, tensors))
        fragments += len(plan.descriptors(caches[-1], target))
    for explanation in (plan.explain(), plan.explain(caches, [target])):
        assert explanation.num_bytes == plan.num_bytes
        assert explanation.num_fragments == fragments
        assert str(explanation)


def _plain(num_groups: int = 1) -> EngineSpec:
    groups = tuple(AttentionGroup((g,), num_kv_heads=2, head_dim=4) for g in range(num_groups))
    return EngineSpec("engine", ModelSpec(groups), tokens_per_block=4, layout="KBNHD")


def test_a_cache_may_be_copied_within_itself_where_nothing_overlaps() -> None:
    """Blocks that are read and blocks that are written are told apart by their bytes."""
    engine = _plain()
    tensors = [np.zeros((2, 8, 4, 2, 4), np.uint16)]
    poison(tensors)
    fill_reference(engine, 0, tensors, [[1, 2]])
    cache, before = KVCache(engine, 0, tensors), snapshot(tensors)
    route = Route(engine, engine)
    apart = [[1, 2]], [[5, 4]], (0, 8)
    route.plan(0, *apart).copy(cache, cache)
    assert check_reference(engine, engine, 0, tensors, before, *apart) is None
    before = snapshot(tensors)
    plan = route.plan(0, [[1, 2]], [[2, 3]], (0, 8))
    with pytest.raises(errors.OverlapError):
        plan.copy(cache, cache)
    assert (snapshot(tensors)[0] == before[0]).all()
    halves = [[1]], [[1]], (0, 4)
    with pytest.raises(errors.OverlapError):
        route.plan(0, *halves).copy(cache, cache)


def test_groups_in_one_memory_must_not_share_a_due_block() -> None:
    """Two groups may use one id where their bytes differ, and only there."""
    engine = _plain(num_groups=2)
    source = KVCache(engine, 0, [np.ones((2, 8, 4, 2, 4), np.uint16) for _ in range(2)])
    plan = Route(engine, engine).plan(0, [[1], [2]], [[3], [3]], (0, 4))
    memory = np.zeros((2, 8, 4, 2, 4), np.uint16)
    with pytest.raises(errors.OverlapError):
        plan.copy(source, KVCache(engine, 0, [memory, memory]))
    assert not memory.any()
    other = np.zeros_like(memory)
    plan.copy(source, KVCache(engine, 0, [memory, other]))
    assert memory.sum() == other.sum() == 2 * 4 * 2 * 4
