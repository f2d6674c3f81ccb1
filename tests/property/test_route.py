"""Plans between random pairs of engines, each judged byte by byte by the reference."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Scenario, Side, allocate, axes_handed_over, scenarios

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, errors
from kvferry.testing import (
    Slot,
    apply_descriptors,
    check_reference,
    expected_bytes,
    expected_error,
    expected_pairs,
    fill_reference,
    poison,
    readers,
    slots,
    snapshot,
)

EXAMPLES = int(os.environ.get("KVFERRY_EXAMPLES", "2000"))
# Rates are meaningful, and asserted, from this many examples on.
COUNTED_EXAMPLES = 2000
HARD_CLASSES = (
    "non-divisible TP",
    "replicas",
    "non-dividing block sizes",
    "partial tail",
    "differing first tokens",
    "null target blocks",
    "active window",
)
COLUMNS = ("source_tensor", "source_offset", "target_tensor", "target_offset", "length")


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
    route = Route(source, target, allow_missing_layers=scenario.allow_missing_layers)
    rng = random.Random(scenario.seed)
    for source_rank in rng.sample(range(source.tp_size), min(source.tp_size, 4)):
        assert tuple(route.readers(source_rank)) == readers(source, target, source_rank)

    sources: dict[int, tuple[list[np.ndarray], KVCache, list[np.ndarray]]] = {}
    for rank in scenario.target_ranks:
        plan = route.plan(rank, *_as_handed_over(scenario, rng), **scenario.firsts)
        _judge_numbers(scenario, rank, plan)
        for source_rank in plan.source_ranks:
            if source_rank not in sources:
                tensors = allocate(scenario.source, source_rank, rng)
                poison(tensors)
                fill_reference(
                    source, source_rank, tensors, scenario.source.blocks,
                    first_token=scenario.source.first_token, mark_rank=True,
                )  # fmt: skip
                cache = _register(scenario.source, source_rank, tensors, rng)
                sources[source_rank] = (tensors, cache, snapshot(tensors))
        _judge_bytes(scenario, rank, plan, sources, rng)
        if rng.random() < 0.3:
            _judge_explanation(scenario, rank, plan)
    for tensors, _, before in sources.values():
        unchanged = zip(snapshot(tensors), before, strict=True)
        assert all((now == then).all() for now, then in unchanged), "a source has changed"


def _as_handed_over(scenario: Scenario, rng: random.Random) -> tuple[Any, ...]:
    """Return the request with its lists in one of the forms that are accepted."""
    form = rng.choice((list, tuple, np.array, lambda ids: np.array(ids, np.int64)))
    as_form = [[form(ids) if ids else ids for ids in side] for side in scenario.request[:2]]
    return *as_form, scenario.tokens


def _register(side: Side, rank: int, tensors: list[np.ndarray], rng: random.Random) -> KVCache:
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


def _judge_numbers(scenario: Scenario, rank: int, plan: Any) -> None:
    """Compare what a plan says about itself before any tensor is known."""
    request = (*scenario.engines, rank, *scenario.request)
    pairs, notify_only = expected_pairs(*request, **scenario.firsts)
    assert sorted(tuple(pair) for pair in plan.pairs) == sorted(pairs)
    assert list(plan.source_ranks) == sorted(source_rank for source_rank, _ in pairs)
    assert list(plan.target_ranks) == ([rank] if pairs else [])
    assert sorted(plan.notify_only) == sorted(notify_only)
    assert plan.num_bytes == sum(expected_bytes(*request, **scenario.firsts).values())


def _judge_bytes(
    scenario: Scenario,
    rank: int,
    plan: Any,
    sources: dict[int, tuple[list[np.ndarray], KVCache, list[np.ndarray]]],
    rng: random.Random,
) -> None:
    """Copy, then do the same by descriptors, and judge every byte of the target both times."""
    request = (*scenario.engines, rank)
    tensors = allocate(scenario.target, rank, rng)
    cache = _register(scenario.target, rank, tensors, rng)
    poison(tensors)
    before = snapshot(tensors)
    caches = [cache for _, cache, _ in sources.values()]
    rng.shuffle(caches)
    if plan.pairs:
        first = plan.source_ranks[0]
        caches_without_first = [end for r, (_, end, _) in sources.items() if r != first]
        with pytest.raises(ValueError, match=str(first)):
            plan.copy(caches_without_first, cache)
    plan.copy(caches[0] if len(caches) == 1 else caches, cache, threads=rng.choice((None, 1, 2)))
    mismatch = check_reference(
        *request, tensors, before, *scenario.request, **scenario.firsts, mark_rank=True
    )
    assert mismatch is None, f"copy: {mismatch}"

    poison(tensors)
    payload = expected_bytes(*request, *scenario.request, **scenario.firsts)
    described = rng.random() < 0.5
    for source_rank in plan.source_ranks:
        source_tensors, source_cache, _ = sources[source_rank]
        ends = (source_cache, cache)
        rows = plan.descriptors(*(end.describe() if described else end for end in ends))
        _judge_summary(rows)
        assert rows.total_bytes == payload[source_rank]
        apply_descriptors(rows, source_tensors, tensors)
        again = plan.descriptors(*ends)
        for name in COLUMNS:
            assert np.array_equal(getattr(rows, name), getattr(again, name))
    mismatch = check_reference(
        *request, tensors, before, *scenario.request, **scenario.firsts, mark_rank=True
    )
    assert mismatch is None, f"descriptors: {mismatch}"


def _judge_summary(rows: Any) -> None:
    lengths = rows.length
    assert len(rows) == len(lengths)
    assert rows.total_bytes == lengths.sum()
    assert rows.min_bytes == lengths.min(initial=rows.total_bytes)
    assert rows.mean_bytes == pytest.approx(lengths.mean() if len(lengths) else 0)


def _judge_explanation(scenario: Scenario, rank: int, plan: Any) -> None:
    """Compare the explanation with descriptors on the dense tensors that it assumes."""
    target = KVCache(scenario.target.engine, rank, _assumed(scenario.target, rank))
    fragments = 0
    caches = []
    for source_rank in plan.source_ranks:
        tensors = _assumed(scenario.source, source_rank)
        caches.append(KVCache(scenario.source.engine, source_rank, tensors))
        fragments += len(plan.descriptors(caches[-1], target))
    for explanation in (plan.explain(), plan.explain(caches, [target])):
        assert explanation.num_bytes == plan.num_bytes
        assert explanation.num_fragments == fragments
        assert str(explanation)


def _assumed(side: Side, rank: int) -> list[np.ndarray]:
    """Return dense tensors of `num_blocks` blocks, else of the highest id plus two."""
    known = side.engine.num_blocks
    known = known if isinstance(known, tuple) else (known,) * len(side.blocks)
    counts = [
        count if count is not None else max([0, *(b for b in ids if b != side.null(g))]) + 2
        for g, (count, ids) in enumerate(zip(known, side.blocks, strict=True))
    ]
    return allocate(side, rank, random.Random(0), counts)


def test_bad_requests_raise_and_change_nothing() -> None:
    """A request with one fault raises an error that the contract names, before anything moves."""
    raised: Counter[str] = Counter()

    @settings(max_examples=max(100, EXAMPLES // 2))
    @given(scenarios(allow_missing_layers=False), st.sampled_from(sorted(FAULTS)))
    def judge(scenario: Scenario, fault: str) -> None:
        rng = random.Random(scenario.seed)
        spoilt = FAULTS[fault](scenario, rng)
        if spoilt is None:
            raised["not applicable"] += 1
            return
        names = expected_error(*spoilt.engines, *spoilt.request, *spoilt.firsts.values())
        accepted = tuple(getattr(errors, name, ValueError) for name in names)
        route, rank = Route(*spoilt.engines), spoilt.target_ranks[0]
        if accepted:
            with pytest.raises(accepted) as caught:
                route.plan(rank, *spoilt.request, **spoilt.firsts)
            assert str(caught.value)
            raised[type(caught.value).__name__] += 1
        elif fault.startswith("bind"):
            raised["on binding"] += 1
            _judge_binding(spoilt, rank, route.plan(rank, *spoilt.request, **spoilt.firsts), rng)
        else:
            raised["harmless"] += 1
            route.plan(rank, *spoilt.request, **spoilt.firsts)

    judge()
    print(", ".join(f"{name}: {count}" for name, count in sorted(raised.items())))
    if EXAMPLES >= COUNTED_EXAMPLES:
        for name in ("AlignmentError", "BlockRangeError", "OverlapError", "ValueError"):
            assert raised[name] >= 10, f"only {raised[name]} requests raised {name}"


def _judge_binding(scenario: Scenario, rank: int, plan: Any, rng: random.Random) -> None:
    """Judge that a due block beyond a tensor's end is found on binding, before a byte moves."""
    tensors = allocate(scenario.target, rank, rng)
    poison(tensors)
    before = snapshot(tensors)
    cache = KVCache(scenario.target.engine, rank, tensors)
    sources = [
        KVCache(scenario.source.engine, source_rank, allocate(scenario.source, source_rank, rng))
        for source_rank in plan.source_ranks
    ]
    with pytest.raises(errors.BlockRangeError):
        plan.copy(sources, cache)
    with pytest.raises(errors.BlockRangeError):  # some pairs may not need the spoilt group
        _ = [plan.descriptors(source, cache) for source in sources]
    assert all((now == then).all() for now, then in zip(snapshot(tensors), before, strict=True))


Fault = Callable[[Scenario, random.Random], "Scenario | None"]


def _with_blocks(scenario: Scenario, side: str, g: int, ids: list[int]) -> Scenario:
    old: Side = getattr(scenario, side)
    blocks = (*old.blocks[:g], ids, *old.blocks[g + 1 :])
    return replace(scenario, **{side: replace(old, blocks=blocks)})


def _due_places(scenario: Scenario, side: str) -> dict[int, list[int]]:
    """Return, a group of one side, the list places under due tokens, where there are any."""
    end: Side = getattr(scenario, side)
    places: dict[int, list[int]] = {}
    for g, group in enumerate(end.engine.model.groups):
        positions: set[int] = set()
        for h, other in enumerate(scenario.target.engine.model.groups):
            if set(group.layers).intersection(other.layers):
                positions.update((scenario.due(h) - end.first(g)) // end.tokens_per_block(g))
        if positions:
            places[g] = sorted(int(place) for place in positions)
    return places


def _one_due(
    scenario: Scenario, side: str, rng: random.Random, least: int = 1
) -> tuple[int, list[int], list[int]] | None:
    """Pick a group with due blocks: return it, its ids, and the due places in a random order."""
    places = {g: due for g, due in _due_places(scenario, side).items() if len(due) >= least}
    if not places:
        return None
    g = rng.choice(sorted(places))
    return g, list(getattr(scenario, side).blocks[g]), rng.sample(places[g], len(places[g]))


def _too_few(side: str) -> Fault:
    def spoil(scenario: Scenario, rng: random.Random) -> Scenario | None:
        picked = _one_due(scenario, side, rng)
        return picked and _with_blocks(scenario, side, picked[0], picked[1][: picked[2][0]])

    return spoil


def _due_id(side: str, new_id: Callable[[Side, int], int | None], *, any_place: bool) -> Fault:
    """Replace one id, due or (with `any_place`) anywhere in the list."""

    def spoil(scenario: Scenario, rng: random.Random) -> Scenario | None:
        picked = _one_due(scenario, side, rng)
        if picked is None:
            return None
        g, ids, due = picked
        block = new_id(getattr(scenario, side), g)
        if block is None:
            return None
        ids[rng.randrange(len(ids)) if any_place else due[0]] = block
        return _with_blocks(scenario, side, g, ids)

    return spoil


def _negative(side: Side, g: int) -> int:
    return -1 if side.null(g) != -1 else -2


def _known_limit(side: Side, g: int) -> int | None:
    limit = side.engine.num_blocks
    limit = limit[g] if isinstance(limit, tuple) else limit
    return limit if limit != side.null(g) else None


def _tensor_limit(side: Side, g: int) -> int | None:
    limit = side.engine.num_blocks
    known = (limit[g] if isinstance(limit, tuple) else limit) is not None
    return None if known or side.num_blocks[g] == side.null(g) else side.num_blocks[g]


def _twice(scenario: Scenario, rng: random.Random) -> Scenario | None:
    picked = _one_due(scenario, "target", rng, least=2)
    if picked is None:
        return None
    g, ids, due = picked
    ids[due[0]] = ids[due[1]]
    return _with_blocks(scenario, "target", g, ids)


def _source_twice(scenario: Scenario, rng: random.Random) -> Scenario | None:
    picked = _one_due(scenario, "source", rng, least=2)
    if picked is None:
        return None
    g, ids, due = picked
    ids[due[0]] = ids[due[1]]
    return _with_blocks(scenario, "source", g, ids)


def _first_token(side: str, change: Callable[[int, random.Random], int]) -> Fault:
    """Move one group's first token by what `change` says, given its tokens per block."""

    def spoil(scenario: Scenario, rng: random.Random) -> Scenario:
        end: Side = getattr(scenario, side)
        firsts = [end.first(g) for g in range(len(end.blocks))]
        g = rng.randrange(len(firsts))
        firsts[g] += change(end.tokens_per_block(g), rng)
        return replace(scenario, **{side: replace(end, first_token=tuple(firsts))})

    return spoil


def _reversed(scenario: Scenario, rng: random.Random) -> Scenario:
    begin, end = scenario.tokens
    return replace(scenario, tokens=(end + 4 * rng.randrange(1, 9), begin))


def _negative_start(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, tokens=(-4 * rng.randrange(1, 9), scenario.tokens[1]))


def _inside_a_slot(scenario: Scenario, rng: random.Random) -> Scenario | None:
    begin, end = scenario.tokens
    if end - begin < 2:
        return None
    return replace(scenario, tokens=rng.choice([(begin + 1, end), (begin, end - 1)]))


def _a_list_missing(scenario: Scenario, rng: random.Random) -> Scenario:
    side = rng.choice(("source", "target"))
    end: Side = getattr(scenario, side)
    return replace(scenario, **{side: replace(end, blocks=end.blocks[:-1])})


FAULTS: dict[str, Fault] = {
    "source list too short": _too_few("source"),
    "target list too short": _too_few("target"),
    "source null block under a due token": _due_id("source", Side.null, any_place=False),
    "negative source id": _due_id("source", _negative, any_place=True),
    "negative target id": _due_id("target", _negative, any_place=True),
    "source id beyond num_blocks": _due_id("source", _known_limit, any_place=True),
    "target id beyond num_blocks": _due_id("target", _known_limit, any_place=True),
    "bind: source id beyond its tensor": _due_id("source", _tensor_limit, any_place=False),
    "bind: target id beyond its tensor": _due_id("target", _tensor_limit, any_place=False),
    "target id twice": _twice,
    "source id twice": _source_twice,
    "source offset inside a block": _first_token("source", lambda size, rng: rng.randrange(size)),
    "target offset inside a block": _first_token("target", lambda size, rng: rng.randrange(size)),
    "source list begins later": _first_token("source", lambda size, rng: size),
    "negative source offset": _first_token("source", lambda size, rng: -40 * size),
    "negative target offset": _first_token("target", lambda size, rng: -40 * size),
    "range reversed": _reversed,
    "range begins before the request": _negative_start,
    "range ends inside a slot": _inside_a_slot,
    "a group without a list": _a_list_missing,
}


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
