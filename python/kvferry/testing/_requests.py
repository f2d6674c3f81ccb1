"""How requests between two engines are drawn: lists of block ids with anything allowed in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from .addresses import has_heads, has_tokens, num_units, per_group, physical_blocks, planes_of
from .routing import source_groups
from .scenario import Scenario, Side

__all__ = ["between", "numbered"]

# An id above this is some engine's idea of a null block: tensors have no room for it.
MAX_REAL_ID = 10**4

Draw = Callable[[Any], Any]


def between(
    draw: Draw,
    source: Any,
    target: Any,
    tokens: tuple[int, int],
    seed: int,
    allow_missing_layers: bool,
) -> Scenario:
    """Draw a request between two engines, the target's lists first: they say what is due."""
    rng = random.Random(seed)
    unjudged = Side(source, tuple([] for _ in source.model.groups))
    target_side = _target_side(draw, rng, target, tokens)
    scenario = Scenario(unjudged, target_side, tokens, seed, allow_missing_layers)
    scenario = replace(scenario, target=_with_idle_target_blocks(rng, scenario))
    scenario = replace(scenario, source=_source_side(draw, rng, scenario))
    return replace(scenario, classes=frozenset(_classes(scenario)))


def _target_side(draw: Draw, rng: random.Random, engine: Any, tokens: tuple[int, int]) -> Side:
    """Draw what the target holds already, and blocks for all the rest of the range."""
    side = Side(engine, ())
    firsts, counts = [], []
    for g in range(len(engine.model.groups)):
        if not side.has_tokens(g):
            firsts.append(rng.choice((0, 5)))
            counts.append(_state_slots(rng))
            continue
        size = side.tokens_per_block(g)
        held = draw(st.one_of(st.just(0), st.integers(0, tokens[1] // size + 1)))
        firsts.append(held * size)
        needed = max(0, -(-(tokens[1] - held * size) // size))
        counts.append(needed + rng.choice((0, 0, 0, 1, 2)))
    side = numbered(draw, rng, side, firsts, counts)
    return _with_null_states(rng, side)


def _source_side(draw: Draw, rng: random.Random, scenario: Scenario) -> Side:
    """Draw lists that cover every due token, with anything allowed around them."""
    side = scenario.source
    groups = range(len(side.blocks))
    needed = [_needed(scenario, g) for g in groups]
    firsts, counts = [], []
    for g, due in enumerate(needed):
        if not side.has_tokens(g):
            firsts.append(rng.choice((0, 5)))
            counts.append(_state_slots(rng))
            continue
        size = side.tokens_per_block(g)
        earliest = int(due[0]) // size if len(due) else 3
        first = size * draw(st.one_of(st.just(0), st.integers(0, earliest)))
        last = (int(due[-1]) - first) // size + 1 if len(due) else 0
        firsts.append(first)
        counts.append(last + rng.choice((0, 0, 0, 1, 2)))
    side = numbered(draw, rng, side, firsts, counts)
    repeats = not side.aliased and rng.random() < 0.15
    blocks = []
    for g, due in enumerate(needed):
        ids = list(side.blocks[g])
        if side.has_tokens(g):
            under_due = set(((due - side.first(g)) // side.tokens_per_block(g)).tolist())
            null = side.null(g)
            for i in range(len(ids)):
                if repeats and rng.random() < 0.3:
                    ids[i] = rng.choice(side.blocks[g])
                if i not in under_due and null is not None and rng.random() < 0.4:
                    ids[i] = null
        blocks.append(ids)
    return _with_null_states(rng, replace(side, blocks=tuple(blocks)))


def _state_slots(rng: random.Random) -> int:
    """Return how many slot ids a state group's list has."""
    return int(rng.random() < 0.85)


def _with_null_states(rng: random.Random, side: Side) -> Side:
    """Make some state slots null."""
    blocks = [list(ids) for ids in side.blocks]
    for g, ids in enumerate(blocks):
        null = side.null(g)
        if not side.has_tokens(g) and ids and null is not None and rng.random() < 0.2:
            ids[0] = null
    return replace(side, blocks=tuple(blocks))


def _needed(scenario: Scenario, source_group: int) -> np.ndarray:
    """Return the tokens for which the source's group must list blocks, ascending."""
    due = [
        scenario.due(g)
        for g in range(len(scenario.target.blocks))
        if source_group in source_groups(*scenario.engines, g)
    ]
    return np.unique(np.concatenate(due)) if due else np.arange(0)


def numbered(
    draw: Draw,
    rng: random.Random,
    side: Side,
    firsts: Sequence[int],
    counts: Sequence[int],
) -> Side:
    """Give every place of every list an id of its own, and the engine a number of blocks."""
    engine = side.engine
    groups = range(len(engine.model.groups))
    aliased = len(groups) > 1 and rng.random() < 0.3
    order = draw(st.sampled_from(["shuffled", "ascending", "descending", "runs"]))
    nulls = {side.null(g) for g in groups}
    slack = rng.choice((0, 1, 3))
    if aliased:
        together = _ids(rng, sum(counts), slack, nulls, order)
        ends = [sum(counts[: g + 1]) for g in groups]
        blocks = [together[end - count : end] for end, count in zip(ends, counts, strict=True)]
        sizes = [_pool_size([*together, *(n for n in nulls if n is not None)], slack)] * len(groups)
    else:
        blocks = [_ids(rng, count, slack, {side.null(g)}, order) for g, count in enumerate(counts)]
        sizes = [_pool_size(ids, slack) for ids in blocks]
    known = draw(st.sampled_from(["no", "no", "yes", "some"]))
    num_blocks: Any = None
    if known == "yes":
        num_blocks = sizes[0] if len(set(sizes)) == 1 else tuple(sizes)
    elif known == "some":
        num_blocks = tuple(size if rng.random() < 0.5 else None for size in sizes)
    same = len(set(firsts)) == 1 and rng.random() < 0.7
    return replace(
        side,
        engine=msgspec.structs.replace(engine, num_blocks=num_blocks),
        blocks=tuple(blocks),
        first_token=firsts[0] if same else tuple(firsts),
        num_blocks=tuple(sizes),
        aliased=aliased,
    )


def _pool_size(ids: Sequence[int], slack: int) -> int:
    """Return a number of blocks that has room for the ids; absurd null ids get none."""
    return max([0, *(block for block in ids if block < MAX_REAL_ID)]) + 1 + slack


def _ids(
    rng: random.Random, count: int, slack: int, nulls: set[int | None], order: str
) -> list[int]:
    """Return `count` different ids, none of them null, in one of the orders that pools produce."""
    free = [block for block in range(count + slack + len(nulls)) if block not in nulls]
    ids = sorted(rng.sample(free, count))
    if order == "shuffled":
        rng.shuffle(ids)
    elif order == "descending":
        ids.reverse()
    elif order == "runs":
        cuts = sorted(rng.sample(range(count), min(count, 3)))
        runs = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
        rng.shuffle(runs)
        ids = [block for run in runs for block in rng.choice((run, run[::-1]))]
    return ids


def _with_idle_target_blocks(rng: random.Random, scenario: Scenario) -> Side:
    """Make some target blocks null, and put any id where nothing is due."""
    side = scenario.target
    blocks = [list(ids) for ids in side.blocks]
    for g, ids in enumerate(blocks):
        if not side.has_tokens(g):
            continue
        null = side.null(g)
        if null is not None and rng.random() < 0.6:
            for i in range(len(ids)):
                if rng.random() < 0.3:
                    ids[i] = null
        now = replace(scenario, target=replace(side, blocks=tuple(blocks)))
        due = set(((now.due(g) - side.first(g)) // side.tokens_per_block(g)).tolist())
        for i in range(len(ids)):
            if i not in due and ids[i] != null and rng.random() < 0.3:
                ids[i] = rng.choice(side.blocks[g])
    return replace(side, blocks=tuple(blocks))


def _classes(scenario: Scenario) -> Iterator[str]:
    """Name the properties of a scenario that make transfers hard."""
    source, target = scenario.engines
    small, large = sorted((source.tp_size, target.tp_size))
    if large % small:
        yield "non-divisible TP"
    for engine in scenario.engines:
        yield from _engine_classes(engine)
    shares = [(engine.cp_size, engine.cp_interleave) for engine in scenario.engines]
    if min(shares)[0] > 1 and shares[0] != shares[1]:
        yield "different CP on both sides"
    groups = target.model.groups
    kinds = {(has_tokens(group), has_heads(group)) for group in groups}
    if len(kinds) > 1:
        yield "mixed kinds"
    for g, group in enumerate(groups):
        if not has_tokens(group):
            yield "state"
            others = {x for other in groups if has_tokens(other) for x in other.layers}
            if others.intersection(group.layers):
                yield "parallel hybrid"
        else:
            if not has_heads(group):
                yield "latent"
            if group.tokens_per_slot > 1:
                yield "several tokens a slot"
            yield from _list_classes(scenario, g)


def _engine_classes(engine: Any) -> Iterator[str]:
    if engine.pp_size > 1:
        yield "PP"
        lengths = {end - begin for begin, end in engine.pp_layers or ()}
        if len(lengths) > 1:
            yield "uneven stages"
    if engine.cp_size > 1:
        yield "CP"
    for g, group in enumerate(engine.model.groups):
        if physical_blocks(engine, g) > 1:
            yield "physical blocks"
        units = [num_units(group, plane) for plane in planes_of(group)]
        if any(1 < count < engine.tp_size for count in units):
            yield "replicas"


def _list_classes(scenario: Scenario, g: int) -> Iterator[str]:
    """Name what is hard about the lists of one of the target's groups of tokens."""
    begin, end = scenario.tokens
    side, due = scenario.target, scenario.due(g)
    group, first, size = side.engine.model.groups[g], side.first(g), side.tokens_per_block(g)
    window = getattr(group, "sliding_window", -1)
    if 0 < window < end - max(begin, first):
        yield "active window"
    covered = range(max(begin - first, 0), end - first)
    null = per_group(side.engine.null_block_id, g)
    if null is not None and any(side.blocks[g][i // size] == null for i in covered):
        yield "null target blocks"
    for h in source_groups(*scenario.engines, g) if len(due) else []:
        sizes = sorted((size, scenario.source.tokens_per_block(h)))
        if sizes[1] % sizes[0]:
            yield "non-dividing block sizes"
        if any(position % size for position in (begin, end) for size in sizes):
            yield "partial tail"
        if first != scenario.source.first(h):
            yield "differing first tokens"
