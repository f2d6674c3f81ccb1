"""Requests with one fault: each raises an error that the contract names, before a byte moves."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from judging import COUNTED_EXAMPLES, EXAMPLES, examples

from kvferry import KVCache, Route, errors
from kvferry.testing import Scenario, Side, allocate, expected_error, poison, snapshot
from kvferry.testing.strategies import scenarios


def test_bad_requests_raise_and_change_nothing() -> None:
    """A request with one fault raises an error that the contract names, before anything moves."""
    raised: Counter[str] = Counter()

    @settings(max_examples=examples(2 * len(FAULTS)))
    @given(scenario=scenarios(allow_missing_layers=False))
    def judge(scenario: Scenario, fault: str) -> None:
        rng = random.Random(scenario.seed)
        spoilt = FAULTS[fault](scenario, rng)
        if spoilt is None:
            raised["not applicable"] += 1
            return
        names = expected_error(*spoilt.engines, *spoilt.request, *spoilt.firsts.values())
        accepted = tuple(getattr(errors, name, ValueError) for name in names)
        route = Route(*spoilt.engines)
        # Lists are checked for every group and token, whichever rank the plan is for.
        make, end = rng.choice([(route.plan, route.target), (route.plan_push, route.source)])
        rank = rng.randrange(end.num_ranks)
        if accepted:
            with pytest.raises(accepted) as caught:
                make(rank, *spoilt.request, **spoilt.firsts)
            assert str(caught.value)
            raised[type(caught.value).__name__] += 1
        elif fault.startswith("bind"):
            raised["on binding"] += 1
            _judge_binding(spoilt, route, rng)
        else:
            raised["harmless"] += 1
            make(rank, *spoilt.request, **spoilt.firsts)

    # Each has its share: drawn with the scenario, some are hardly met in some runs.
    for fault in FAULTS:
        judge(fault=fault)
    print(", ".join(f"{name}: {count}" for name, count in sorted(raised.items())))
    if EXAMPLES >= COUNTED_EXAMPLES:
        for name in ("AlignmentError", "BlockRangeError", "OverlapError", "ValueError"):
            assert raised[name], f"no request raised {name}"


def _judge_binding(scenario: Scenario, route: Route, rng: random.Random) -> None:
    """Judge that a due block beyond a tensor's end is found on binding, before a byte moves.

    Only ranks that need something under that block can find it; some rank does.
    """
    ranks = list(range(route.target.num_ranks))
    rng.shuffle(ranks)
    for rank in ranks:
        plan = route.plan(rank, *scenario.request, **scenario.firsts)
        tensors = allocate(scenario.target, rank, rng, scenario.target.num_blocks)
        poison(tensors)
        before = snapshot(tensors)
        cache = KVCache(route.target, rank, tensors)
        sources = [
            KVCache(route.source, r, allocate(scenario.source, r, rng, scenario.source.num_blocks))
            for r in plan.source_ranks
        ]
        try:
            plan.copy(sources, cache)
        except errors.BlockRangeError:
            with pytest.raises(errors.BlockRangeError):  # some pairs may not need the block
                _ = [plan.descriptors(source, cache) for source in sources]
            assert all(map(np.array_equal, snapshot(tensors), before))
            return
    pytest.fail("no rank has noticed")


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
        if not end.has_tokens(g):
            continue
        positions: set[int] = set()
        for h, other in enumerate(scenario.target.engine.model.groups):
            if scenario.target.has_tokens(h) and set(group.layers).intersection(other.layers):
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

    def spoil(scenario: Scenario, rng: random.Random) -> Scenario | None:
        end: Side = getattr(scenario, side)
        firsts = [end.first(g) for g in range(len(end.blocks))]
        of_tokens = [g for g in range(len(firsts)) if end.has_tokens(g)]
        if not of_tokens:
            return None
        g = rng.choice(of_tokens)
        firsts[g] += change(end.tokens_per_block(g), rng)
        return replace(scenario, **{side: replace(end, first_token=tuple(firsts))})

    return spoil


def _step(scenario: Scenario) -> int:
    """Return the tokens of which every range is a multiple."""
    groups = scenario.source.engine.model.groups
    return math.lcm(*(getattr(group, "tokens_per_slot", 1) for group in groups))


def _reversed(scenario: Scenario, rng: random.Random) -> Scenario:
    begin, end = scenario.tokens
    return replace(scenario, tokens=(end + _step(scenario) * rng.randrange(1, 9), begin))


def _negative_start(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, tokens=(-_step(scenario) * rng.randrange(1, 9), scenario.tokens[1]))


def _inside_a_slot(scenario: Scenario, rng: random.Random) -> Scenario | None:
    begin, end = scenario.tokens
    if end - begin < 2:
        return None
    return replace(scenario, tokens=rng.choice([(begin + 1, end), (begin, end - 1)]))


def _state(side: str, new_ids: Callable[[Side, int], list[int] | None]) -> Fault:
    """Replace the slot ids of one state group."""

    def spoil(scenario: Scenario, rng: random.Random) -> Scenario | None:
        end: Side = getattr(scenario, side)
        states = [g for g in range(len(end.blocks)) if not end.has_tokens(g)]
        if not states:
            return None
        g = rng.choice(states)
        ids = new_ids(end, g)
        return None if ids is None else _with_blocks(scenario, side, g, ids)

    return spoil


def _two_slots(side: Side, g: int) -> list[int] | None:
    ids = [block for block in range(side.num_blocks[g]) if block != side.null(g)]
    return ids[:2] if len(ids) >= 2 else None


def _negative_slot(side: Side, g: int) -> list[int]:
    return [_negative(side, g)]


def _slot_beyond_limit(side: Side, g: int) -> list[int] | None:
    limit = _known_limit(side, g)
    return None if limit is None else [limit]


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
    "two source states": _state("source", _two_slots),
    "two target states": _state("target", _two_slots),
    "negative source state": _state("source", _negative_slot),
    "negative target state": _state("target", _negative_slot),
    "source state beyond num_blocks": _state("source", _slot_beyond_limit),
    "target state beyond num_blocks": _state("target", _slot_beyond_limit),
    "range reversed": _reversed,
    "range begins before the request": _negative_start,
    "range ends inside a slot": _inside_a_slot,
    "a group without a list": _a_list_missing,
}
