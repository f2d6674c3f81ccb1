"""Hypothesis strategies: models, engines, routes, block tables, and whole requests.

Everything drawn is valid by the contract, in every combination that it allows: uneven splits,
replicas, ragged block sizes, windows, null blocks, states beside attention, pipeline stages and
context parallelism. Structure is drawn choice by choice, so that failures shrink; bulk (ids,
padding) comes from one drawn seed, so that an example stays cheap.

This module needs hypothesis, the rest of `kvferry.testing` does not.

Examples
--------
A connector is tested against every pair of engines that it may meet. Here it is kvferry itself;
`my_readers` stands for your own code.

>>> from hypothesis import given, settings
>>> from kvferry.testing import readers
>>> from kvferry.testing.strategies import routes
>>> def my_readers(source, target, source_rank):
...     return Route(source, target).readers(source_rank)
>>> @settings(max_examples=5, database=None, deadline=None)
... @given(routes())
... def test_every_reader_is_told(route):
...     for rank in range(route.source.num_ranks):
...         expected = readers(route.source, route.target, rank)
...         assert my_readers(route.source, route.target, rank) == expected
>>> test_every_reader_is_told()

Bytes are judged the same way: fill the sources, let the connector run, and check every target rank.

>>> from kvferry import KVCache
>>> from kvferry.testing import allocate, check_reference, fill_reference, poison
>>> def my_transfer(scenario, target_rank, sources, target):
...     route = Route(*scenario.engines)
...     route.plan(target_rank, *scenario.request, **scenario.firsts).copy(sources, target)
>>> @settings(max_examples=5, database=None, deadline=None)
... @given(scenarios(allow_missing_layers=False))
... def test_every_byte_arrives(scenario):
...     rng, source, target = random.Random(scenario.seed), scenario.source, scenario.target
...     sources = []
...     for rank in range(source.engine.num_ranks):
...         tensors = allocate(source, rank, rng)
...         fill_reference(
...             source.engine, rank, tensors, source.blocks, first_token=source.first_token
...         )
...         sources.append(KVCache(source.engine, rank, tensors))
...     for rank in range(target.engine.num_ranks):
...         tensors = allocate(target, rank, rng)
...         poison(tensors)
...         my_transfer(scenario, rank, sources, KVCache(target.engine, rank, tensors))
...         assert check_reference(
...             *scenario.engines, rank, tensors, None, *scenario.request, **scenario.firsts
...         ) is None
>>> test_every_byte_arrives()
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "kvferry.testing.strategies needs hypothesis: pip install hypothesis", name=error.name
    ) from None

from kvferry.plan import Route
from kvferry.specs import AttentionGroup, EngineSpec, LatentGroup, ModelSpec, StateGroup, StatePart

from . import _requests
from .addresses import DTYPE_BITS, has_heads, has_tokens
from .scenario import Scenario, Side

__all__ = ["block_tables", "engines", "models", "routes", "scenarios"]

MAX_LAYER = 90
MAX_BLOCK_TOKENS = 40
MAX_TOKENS = 96
# Where there are PP or CP ranks, TP ranks are fewer: a route's cost grows with all of them.
TP_SIZES = (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 64)
PP_SIZES = (1, 1, 1, 1, 2, 3)
CP_SIZES = (1, 1, 1, 1, 2, 2, 3, 4)
TP_SIZES_OF_MANY_STAGES = (1, 1, 2, 2, 3, 4, 6, 8)
# Keys and values of one size may share an axis; others need packing or tensors of their own.
LAYOUTS_WITH_PLANES = ("KBNHD", "KBHND", "NHD", "HND", "BKNHD", "BLKNHD", "BKLNHD", "LBKHND")
LAYOUTS_FOR_ALL = ("BHNC", "BNHC", "LBHNC", "BNHD", "BHND", "LBNHD", "BLNHC")

_dtypes = st.sampled_from(sorted(DTYPE_BITS))
_null_ids = st.one_of(st.integers(-9, 6), st.sampled_from([-1, 0, 10**6, -(2**40)]))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Draw a model of one to three groups over a handful of layers.

    Groups are of attention, latent or state kind, of any geometry and type. Now and then a state
    group has layers that attention has too (a parallel hybrid).

    Returns
    -------
    ModelSpec
    """
    count = draw(st.sampled_from([1, 1, 2, 2, 2, 3]))
    highest = draw(st.sampled_from([7, 11, MAX_LAYER]))
    numbers = draw(
        st.lists(st.integers(0, highest), min_size=count, max_size=max(count, 5), unique=True)
    )
    makers = [_attention, _attention, _attention, _latent, _state]
    groups: list[Any] = []
    for k in range(count):
        layers = tuple(numbers[k::count])
        make = draw(st.sampled_from(makers))
        if make is _state and groups and has_tokens(groups[0]) and draw(st.integers(0, 3)):
            # Those layers are in no other state group: a layer has one state.
            makers = [maker for maker in makers if maker is not _state]
            layers = groups[0].layers[: draw(st.integers(1, len(groups[0].layers)))]
        groups.append(draw(make(layers)))
    return ModelSpec(groups=tuple(groups))


@st.composite
def _attention(draw: st.DrawFn, layers: tuple[int, ...]) -> AttentionGroup:
    head_dim = 2 * draw(st.integers(1, 4))
    per_slot = draw(st.sampled_from([1, 1, 1, 1, 2, 4]))
    window = draw(st.one_of(st.just(-1), st.just(-1), st.integers(1, 40 // per_slot)))
    return AttentionGroup(
        layers=layers,
        num_kv_heads=draw(st.integers(1, 12)),
        head_dim=head_dim,
        dtype=draw(_dtypes),
        v_head_dim=draw(st.sampled_from([None, None, None, head_dim, 2, 6])),
        sliding_window=window if window < 0 else window * per_slot,
        tokens_per_slot=per_slot,
    )


@st.composite
def _latent(draw: st.DrawFn, layers: tuple[int, ...]) -> LatentGroup:
    return LatentGroup(
        layers=layers,
        latent_dim=2 * draw(st.integers(1, 12)),
        dtype=draw(_dtypes),
        tokens_per_slot=draw(st.sampled_from([1, 1, 1, 2, 4])),
    )


@st.composite
def _state(draw: st.DrawFn, layers: tuple[int, ...]) -> StateGroup:
    names = draw(st.sampled_from([["conv", "ssm"], ["x", "B", "C", "ssm"], ["state"]]))
    return StateGroup(layers=layers, parts=tuple(draw(_part(name)) for name in names))


@st.composite
def _part(draw: st.DrawFn, name: str) -> StatePart:
    """Draw a part whose sharded axis, if any, is any of its axes."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shard_axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    shard_units = None
    dtype = draw(_dtypes)
    # Two elements of half a byte are one item: it stays whole, in every unit.
    pair = 2 if DTYPE_BITS[dtype] < 8 else 1
    last = len(shape) - 1
    if shard_axis is not None:
        units = draw(st.integers(1, 6))
        per_unit = draw(st.sampled_from([1, 1, 2, 3])) * (pair if shard_axis == last else 1)
        shape[shard_axis] = units * per_unit
        shard_units = None if per_unit == 1 and draw(st.booleans()) else units
    if shard_axis != last:
        shape[last] *= pair
    return StatePart(name, tuple(shape), dtype, shard_axis, shard_units)


@st.composite
def engines(
    draw: st.DrawFn,
    model: ModelSpec,
    *,
    engine_id: str = "engine",
    max_ranks: int | None = None,
    may_lack_layers: bool = False,
) -> EngineSpec:
    """Draw an engine that serves a model: its groups, ranks, blocks and memory.

    Parameters
    ----------
    model
        The engine's own groups are those of the model, or parts of them, in any order.
    engine_id
        The engine's name.
    max_ranks
        Bounds the ranks, for tests that allocate the tensors of all of them.
    may_lack_layers
        Whether layers may be left out, other than the first group's.

    Returns
    -------
    EngineSpec
    """
    groups = _regrouped(draw, model, may_lack_layers)
    num_layers = 1 + max(layer for group in groups for layer in group.layers)
    most = 10**6 if max_ranks is None else max_ranks
    pp_size = draw(st.sampled_from([x for x in PP_SIZES if x <= min(num_layers, most)]))
    most //= pp_size
    cp_size = draw(st.sampled_from([x for x in CP_SIZES if x <= most]))
    most //= cp_size
    tp_sizes = TP_SIZES if pp_size * cp_size == 1 else TP_SIZES_OF_MANY_STAGES
    tp_size = draw(st.sampled_from([x for x in tp_sizes if x <= most]))
    slot_tokens = math.lcm(*(getattr(group, "tokens_per_slot", 1) for group in groups))
    interleave = draw(st.sampled_from([1, 1, 2, 3, 4]))
    if cp_size > 1:
        interleave *= slot_tokens
    nulls = draw(st.sampled_from(["none", "one", "each"]))
    null: Any = None
    if nulls == "one":
        null = draw(_null_ids)
    elif nulls == "each":
        null = tuple(draw(st.one_of(st.none(), _null_ids)) for _ in groups)
    physical = [draw(st.sampled_from([1, 1, 1, 1, 2, 3])) for _ in groups]
    if draw(st.booleans()):
        physical = [physical[0]] * len(groups)
    sizes, layouts = _blocks(draw, groups, cp_size, interleave, physical)
    return EngineSpec(
        engine_id=engine_id,
        model=ModelSpec(groups=groups),
        tokens_per_block=_once_if_same(draw, groups, sizes, draw(st.sampled_from([0, 7]))),
        layout=_layout_field(draw, groups, layouts),
        tp_size=tp_size,
        pp_size=pp_size,
        cp_size=cp_size,
        cp_interleave=interleave,
        pp_layers=_stages(draw, groups, num_layers, pp_size),
        head_ranges=_head_ranges(draw, groups, tp_size),
        null_block_id=null,
        physical_blocks_per_block=_once_if_same(draw, groups, physical, 1),
    )


def _regrouped(draw: st.DrawFn, model: ModelSpec, may_lack_layers: bool) -> tuple[Any, ...]:
    """Split groups further, put them in any order, and perhaps leave one out."""
    members: list[tuple[int, Any]] = []
    for k, group in enumerate(model.groups):
        labels = [draw(st.integers(0, 2)) if draw(st.booleans()) else 0 for _ in group.layers]
        for label in sorted(set(labels)):
            layers = [x for x, y in zip(group.layers, labels, strict=True) if y == label]
            members.append((k, msgspec.structs.replace(group, layers=tuple(layers))))
    if may_lack_layers and members[-1][0] != 0 and draw(st.booleans()):
        members.pop()  # the first group's layers stay, so that engines share some
    if len(members) > 1:
        members = draw(st.permutations(members))
    return tuple(group for _, group in members)


def _blocks(
    draw: st.DrawFn,
    groups: Sequence[Any],
    cp_size: int,
    interleave: int,
    physical: Sequence[int],
) -> tuple[list[int], list[str]]:
    """Draw tokens per block and a layout for every group, now and then the same for all."""
    steps = [
        math.lcm(cp_size * interleave, cp_size * p * group.tokens_per_slot)
        if has_tokens(group)
        else 1
        for group, p in zip(groups, physical, strict=True)
    ]
    if draw(st.integers(0, 4)) == 0:
        step = math.lcm(*steps)
        size = step * draw(st.integers(1, max(1, 16 // step)))
        shared = draw(_layouts(all(map(_may_share_an_axis, groups))))
        latent = draw(_latent_layouts)
        return [size] * len(groups), [shared if has_heads(group) else latent for group in groups]
    sizes = [step * draw(st.integers(1, max(1, MAX_BLOCK_TOKENS // step))) for step in steps]
    layouts = [
        draw(_layouts(_may_share_an_axis(group)) if has_heads(group) else _latent_layouts)
        for group in groups
    ]
    return sizes, layouts


def _may_share_an_axis(group: Any) -> bool:
    """Say whether keys and values are of one size."""
    return not has_heads(group) or group.v_head_dim in (None, group.head_dim)


@st.composite
def _layouts(draw: st.DrawFn, plane_axis: bool) -> str:
    """Draw a layout of the field, or any order of any set of axes that makes one."""
    if draw(st.booleans()):
        return draw(st.sampled_from(LAYOUTS_FOR_ALL + LAYOUTS_WITH_PLANES * plane_axis))
    planes = draw(st.sampled_from(["K", "C", ""] if plane_axis else ["C", ""]))
    letters = "BNH" + draw(st.sampled_from(["", "L"])) + planes.replace("C", "")
    return "".join(draw(st.permutations(letters))) + ("C" if planes == "C" else "D")


_latent_layouts = st.sampled_from(["BND", "BND", "BLND", "LBND", "NBD", "BNLD", "NLBD"])


def _once_if_same(draw: st.DrawFn, groups: Sequence[Any], values: Sequence[int], idle: int) -> Any:
    """Give a per-group value once where that says the same, and draw which way.

    A state group ignores it, so `idle` stands in its place.
    """
    used = {value for group, value in zip(groups, values, strict=True) if has_tokens(group)}
    if len(used) == 1 and draw(st.booleans()):
        return used.pop()
    return tuple(
        value if has_tokens(group) else idle for group, value in zip(groups, values, strict=True)
    )


def _layout_field(draw: st.DrawFn, groups: Sequence[Any], layouts: Sequence[str]) -> Any:
    """Give the layout once where that says the same, and draw which way."""
    by_kind = list(zip(groups, layouts, strict=True))
    of_heads = {layout for group, layout in by_kind if has_heads(group)}
    rest = {layout for group, layout in by_kind if has_tokens(group) and not has_heads(group)}
    if len(of_heads) <= 1 and rest <= {"BND"} and draw(st.booleans()):
        # A single layout is that of attention, even where there is none.
        return of_heads.pop() if of_heads else draw(st.sampled_from(LAYOUTS_FOR_ALL))
    return tuple(layout if has_tokens(group) else "BS" for group, layout in by_kind)


def _stages(
    draw: st.DrawFn, groups: Sequence[Any], num_layers: int, pp_size: int
) -> tuple[tuple[int, int], ...] | None:
    """Draw `None` where stages are even, or cuts that are likely to part the cached layers."""
    if num_layers % pp_size == 0 and draw(st.booleans()):
        return None
    if pp_size == 1:
        return None if draw(st.booleans()) else ((0, num_layers),)
    near = sorted({layer for group in groups for layer in group.layers} - {0})
    cuts = set(draw(st.permutations(near))[: pp_size - 1]) if draw(st.booleans()) else set()
    rest = [cut for cut in range(1, num_layers) if cut not in cuts]
    rng = random.Random(draw(st.integers(0, 999)))
    cuts |= set(rng.sample(rest, pp_size - 1 - len(cuts)))
    return tuple(pairwise([0, *sorted(cuts), num_layers]))


def _head_ranges(draw: st.DrawFn, groups: Sequence[Any], tp_size: int) -> Any:
    """Draw `None`, or uneven, shuffled or overlapping ranges, one split for all or one a group."""
    heads = [group.num_kv_heads for group in groups if has_heads(group)]
    if not heads or tp_size > 12 or draw(st.integers(0, 3)):
        return None
    splits = {count: _split(draw, count, tp_size) for count in sorted(set(heads))}
    if len(splits) == 1 and draw(st.booleans()):
        return splits[heads[0]]
    return tuple(splits[group.num_kv_heads] if has_heads(group) else None for group in groups)


def _split(draw: st.DrawFn, heads: int, tp_size: int) -> tuple[tuple[int, int], ...]:
    """Draw one non-empty range of heads a rank that together cover all heads."""
    rng = random.Random(draw(st.integers(0, 999)))
    if tp_size <= heads:
        cuts = [0, *sorted(rng.sample(range(1, heads), tp_size - 1)), heads]
        ranges = list(pairwise(cuts))
    else:
        firsts = [rank * heads // tp_size for rank in range(tp_size)]
        ranges = [(first, first + 1) for first in firsts]
    if rng.random() < 0.5:
        ranges = [
            (max(0, begin - rng.choice((0, 0, 1))), min(heads, end + rng.choice((0, 0, 1, 2))))
            for begin, end in ranges
        ]
    if rng.random() < 0.3:
        rng.shuffle(ranges)
    return tuple(ranges)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Draw a route between two engines of one model; they are its `source` and `target`.

    Returns
    -------
    Route
    """
    model = draw(models())
    source, target = (draw(engines(model, engine_id=name)) for name in ("source", "target"))
    return Route(source, target)


@st.composite
def block_tables(draw: st.DrawFn, engine: EngineSpec, tokens: tuple[int, int]) -> Side:
    """Draw what an engine's block manager hands out for a request.

    Parameters
    ----------
    engine
        Whose blocks they are; of it, `num_blocks` may be filled in.
    tokens
        The request's range; blocks cover all of it, and may begin at any block boundary before it
        or end after it. No id is null, and none is listed twice.

    Returns
    -------
    Side
        The engine, lists and offsets, with the room that tensors need.
    """
    side = Side(engine, tuple([] for _ in engine.model.groups))
    firsts, counts = [], []
    for g in range(len(side.blocks)):
        size = side.tokens_per_block(g) if side.has_tokens(g) else 1
        first = draw(st.integers(0, tokens[0] // size)) * size if side.has_tokens(g) else 0
        needed = max(0, -(-(tokens[1] - first) // size)) if side.has_tokens(g) else 1
        firsts.append(first)
        counts.append(needed + (draw(st.integers(0, 1)) if side.has_tokens(g) else 0))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return _requests.numbered(draw, rng, side, firsts, counts)


@st.composite
def scenarios(draw: st.DrawFn, *, allow_missing_layers: bool = True) -> Scenario:
    """Draw two engines and a request between them, with everything that the contract allows.

    The target may hold a prefix already, blocks may be null or listed where nothing is due, lists
    may begin at different places, and a source block may be listed twice.

    Parameters
    ----------
    allow_missing_layers
        Whether now and then one engine may lack layers of the other.

    Returns
    -------
    Scenario
    """
    model = draw(models())
    seed = draw(st.integers(0, 2**32 - 1))
    missing = allow_missing_layers and draw(st.integers(0, 19)) == 0
    source, target = (
        draw(engines(model, engine_id=name, may_lack_layers=missing))
        for name in ("source", "target")
    )
    step = math.lcm(*(getattr(group, "tokens_per_slot", 1) for group in model.groups))
    end = step * draw(st.integers(0, MAX_TOKENS // step))
    begin = step * draw(st.one_of(st.just(0), st.integers(0, end // step)))
    return _requests.between(draw, source, target, (begin, end), seed, missing)
