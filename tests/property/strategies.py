"""Random pairs of engines with a request between them, valid by construction.

Structure (models, sizes, layouts, ranges) is drawn choice by choice, so that failures shrink; bulk
(block tables, padding) comes from one drawn seed, so that an example stays cheap.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvferry import AttentionGroup, EngineSpec, ModelSpec
from kvferry.testing import axes_of, due_tokens, slots, tensor_shape

__all__ = ["Scenario", "Side", "allocate", "axes_handed_over", "item_bytes", "scenarios"]

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
TP_SIZES = [1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 64]
FIELD_LAYOUTS = {
    True: ["KBNHD", "KBHND", "NHD", "HND", "BKNHD", "BLKNHD", "BKLNHD", "LBKHND"],
    False: ["BHNC", "BNHC", "LBHNC", "BNHD", "BHND", "LBNHD", "BLNHC"],
}
MAX_BLOCK_TOKENS = 40
MAX_TOKENS = 96


@dataclass(frozen=True)
class Kind:
    """What layers have in common when they may share a group: their geometry."""

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    v_head_dim: int | None
    dtype: str
    window: int
    tokens_per_slot: int


@dataclass(frozen=True)
class Side:
    """One engine of a request, its lists, and the sizes of its tensors."""

    engine: EngineSpec
    blocks: tuple[list[int], ...]
    first_token: int | tuple[int, ...]
    num_blocks: tuple[int, ...]
    aliased: bool  # groups may share memory: no id occurs in two of the lists

    def first(self, g: int) -> int:
        """Return group `g`'s first token."""
        return self.first_token if isinstance(self.first_token, int) else self.first_token[g]

    def tokens_per_block(self, g: int) -> int:
        """Return group `g`'s tokens per block."""
        size = self.engine.tokens_per_block
        return size if isinstance(size, int) else size[g]

    def null(self, g: int) -> int | None:
        """Return group `g`'s null block id."""
        null = self.engine.null_block_id
        return null[g] if isinstance(null, tuple) else null


@dataclass(frozen=True)
class Scenario:
    """A request between two engines, and the target ranks for which it is planned."""

    source: Side
    target: Side
    tokens: tuple[int, int]
    target_ranks: tuple[int, ...]
    seed: int
    allow_missing_layers: bool = False
    classes: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def engines(self) -> tuple[EngineSpec, EngineSpec]:
        """Return (source, target)."""
        return self.source.engine, self.target.engine

    @property
    def request(self) -> tuple[Any, Any, tuple[int, int]]:
        """Return the positional arguments that follow the rank in `Route.plan`."""
        return self.source.blocks, self.target.blocks, self.tokens

    @property
    def firsts(self) -> dict[str, Any]:
        """Return the keyword arguments of `Route.plan`."""
        return {
            "source_first_token": self.source.first_token,
            "target_first_token": self.target.first_token,
        }

    def due(self, g: int) -> np.ndarray:
        """Return the tokens of the target's group `g` that are due."""
        return due_tokens(*self.engines, g, *self.request, *self.firsts.values())


@st.composite
def scenarios(draw: st.DrawFn, *, allow_missing_layers: bool = True) -> Scenario:
    """Draw a request that every part of the contract allows."""
    kinds = draw(_kinds())
    seed = draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    missing = allow_missing_layers and draw(st.integers(0, 19)) == 0
    source, target = (_engine(draw, name, kinds, missing) for name in ("source", "target"))
    step = math.lcm(*(kind.tokens_per_slot for kind in kinds))
    end = step * draw(st.integers(0, MAX_TOKENS // step))
    begin = step * draw(st.one_of(st.just(0), st.integers(0, end // step)))
    tokens = (begin, end)

    target_side = _target_side(draw, rng, target, tokens)
    unjudged = Side(source, tuple([] for _ in source.model.groups), 0, (), False)
    scenario = Scenario(unjudged, target_side, tokens, (), seed, missing)
    target_side = _with_idle_target_blocks(rng, scenario)
    scenario = replace(scenario, target=target_side)
    scenario = replace(scenario, source=_source_side(draw, rng, scenario))
    ranks = range(target.tp_size)
    chosen = ranks if len(ranks) <= 4 else sorted(rng.sample(ranks, 3))
    scenario = replace(scenario, target_ranks=tuple(chosen))
    return replace(scenario, classes=frozenset(_classes(scenario)))


@st.composite
def _kinds(draw: st.DrawFn) -> list[Kind]:
    """Draw one to three layer geometries over a handful of layers."""
    count = draw(st.sampled_from([1, 1, 1, 2, 2, 3]))
    numbers = draw(
        st.lists(st.integers(0, 90), min_size=count, max_size=max(count, 5), unique=True)
    )
    kinds = []
    for k in range(count):
        head_dim = 2 * draw(st.integers(1, 4))
        per_slot = draw(st.sampled_from([1, 1, 1, 1, 2, 4]))
        window = draw(st.one_of(st.just(-1), st.just(-1), st.integers(1, 40 // per_slot)))
        kinds.append(
            Kind(
                layers=tuple(numbers[k::count]),
                heads=draw(st.integers(1, 12)),
                head_dim=head_dim,
                v_head_dim=draw(st.sampled_from([None, None, None, head_dim, 2, 6])),
                dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
                window=window if window < 0 else window * per_slot,
                tokens_per_slot=per_slot,
            )
        )
    return kinds


def _engine(draw: st.DrawFn, name: str, kinds: Sequence[Kind], missing: bool) -> EngineSpec:
    """Draw how an engine groups the layers, and how it cuts every group into ranks and blocks."""
    members: list[tuple[Kind, tuple[int, ...]]] = []
    hybrid = draw(st.integers(0, 4)) == 0  # one geometry of blocks and memory for all groups
    for kind in kinds:
        labels = [draw(st.integers(0, 2)) if draw(st.booleans()) else 0 for _ in kind.layers]
        for label in sorted(set(labels)):
            layers = [x for x, y in zip(kind.layers, labels, strict=True) if y == label]
            members.append((kind, tuple(layers)))
    if missing and members[-1][0] is not kinds[0] and draw(st.booleans()):
        members.pop()  # layers of the first kind stay, so that the engines share some
    if len(members) > 1:
        members = draw(st.permutations(members))
    groups = tuple(
        AttentionGroup(
            layers=layers,
            num_kv_heads=kind.heads,
            head_dim=kind.head_dim,
            dtype=kind.dtype,
            v_head_dim=kind.v_head_dim,
            sliding_window=kind.window,
            tokens_per_slot=kind.tokens_per_slot,
        )
        for kind, layers in members
    )
    tp_size = draw(st.sampled_from(TP_SIZES))
    plane_axis = [group.v_head_dim in (None, group.head_dim) for group in groups]
    if hybrid:
        layouts = [draw(_layouts(all(plane_axis)))] * len(groups)
        step = math.lcm(*(group.tokens_per_slot for group in groups))
        block_tokens = [step * draw(st.integers(1, 16 // step))] * len(groups)
    else:
        layouts = [draw(_layouts(possible)) for possible in plane_axis]
        block_tokens = [
            group.tokens_per_slot * draw(st.integers(1, MAX_BLOCK_TOKENS // group.tokens_per_slot))
            for group in groups
        ]
    nulls = draw(st.sampled_from(["none", "one", "each"]))
    null: Any = None
    if nulls == "one":
        null = draw(_null_ids)
    elif nulls == "each":
        null = tuple(draw(st.one_of(st.none(), _null_ids)) for _ in groups)
    return EngineSpec(
        engine_id=name,
        model=ModelSpec(groups=groups),
        tokens_per_block=_once_if_same(draw, block_tokens),
        layout=_once_if_same(draw, layouts),
        tp_size=tp_size,
        head_ranges=_head_ranges(draw, [group.num_kv_heads for group in groups], tp_size),
        null_block_id=null,
    )


_null_ids = st.one_of(st.integers(-9, 6), st.sampled_from([-1, 0, 10**6, -(2**40)]))


def _once_if_same(draw: st.DrawFn, values: Sequence[Any]) -> Any:
    """Give a per-group value once where that says the same, and draw which way."""
    once = len(set(values)) == 1 and draw(st.booleans())
    return values[0] if once else tuple(values)


@st.composite
def _layouts(draw: st.DrawFn, plane_axis: bool) -> str:
    """Draw a layout of the field, or any order of any set of axes that makes one."""
    if draw(st.booleans()):
        names = FIELD_LAYOUTS[False] + (FIELD_LAYOUTS[True] if plane_axis else [])
        return draw(st.sampled_from(names))
    planes = draw(st.sampled_from(["K", "C", ""] if plane_axis else ["C", ""]))
    letters = "BNH" + draw(st.sampled_from(["", "L"])) + planes.replace("C", "")
    return "".join(draw(st.permutations(letters))) + ("C" if planes == "C" else "D")


def _head_ranges(draw: st.DrawFn, heads: Sequence[int], tp_size: int) -> Any:
    """Draw `None`, or uneven, shuffled or overlapping ranges, one split for all or one a group."""
    if tp_size > 12 or draw(st.integers(0, 3)):
        return None
    splits = [_split(draw, count, tp_size) for count in heads]
    if len(set(heads)) == 1 and draw(st.booleans()):
        return splits[0]
    return tuple(splits)


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


def _target_side(
    draw: st.DrawFn, rng: random.Random, engine: EngineSpec, tokens: tuple[int, int]
) -> Side:
    """Draw what the target holds already, and blocks for all the rest of the range."""
    groups = range(len(engine.model.groups))
    side = Side(engine, (), 0, (), False)
    firsts = []
    for g in groups:
        size = side.tokens_per_block(g)
        held = draw(st.one_of(st.just(0), st.integers(0, tokens[1] // size + 1)))
        firsts.append(held * size)
    counts = [
        max(0, -(-(tokens[1] - first) // side.tokens_per_block(g))) + rng.choice((0, 0, 0, 1, 2))
        for g, first in enumerate(firsts)
    ]
    return _numbered(draw, rng, side, firsts, counts)


def _source_side(draw: st.DrawFn, rng: random.Random, scenario: Scenario) -> Side:
    """Draw lists that cover every due token, with anything allowed around them."""
    source, _ = scenario.engines
    side = scenario.source
    needed = [_needed(scenario, g) for g in range(len(source.model.groups))]
    firsts, counts = [], []
    for g, due in enumerate(needed):
        size = side.tokens_per_block(g)
        earliest = int(due[0]) // size if len(due) else 3
        first = size * draw(st.one_of(st.just(0), st.integers(0, earliest)))
        last = (int(due[-1]) - first) // size + 1 if len(due) else 0
        firsts.append(first)
        counts.append(last + rng.choice((0, 0, 0, 1, 2)))
    side = _numbered(draw, rng, side, firsts, counts)
    repeats = not side.aliased and rng.random() < 0.15
    blocks = []
    for g, due in enumerate(needed):
        ids = list(side.blocks[g])
        under_due = set(((due - firsts[g]) // side.tokens_per_block(g)).tolist())
        for i in range(len(ids)):
            if repeats and rng.random() < 0.3:
                ids[i] = rng.choice(side.blocks[g])
            if i not in under_due and side.null(g) is not None and rng.random() < 0.4:
                ids[i] = side.null(g)
        blocks.append(ids)
    return replace(side, blocks=tuple(blocks))


def _needed(scenario: Scenario, source_group: int) -> np.ndarray:
    """Return the tokens for which the source's group must list blocks, ascending."""
    layers = set(scenario.source.engine.model.groups[source_group].layers)
    due = [
        scenario.due(g)
        for g, group in enumerate(scenario.target.engine.model.groups)
        if layers.intersection(group.layers)
    ]
    return np.unique(np.concatenate(due)) if due else np.arange(0)


def _numbered(
    draw: st.DrawFn,
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
    engine = msgspec.structs.replace(engine, num_blocks=num_blocks)
    first_token = firsts[0] if same else tuple(firsts)
    return replace(
        side,
        engine=engine,
        blocks=tuple(blocks),
        first_token=first_token,
        num_blocks=tuple(sizes),
        aliased=aliased,
    )


def _pool_size(ids: Sequence[int], slack: int) -> int:
    """Return a number of blocks that has room for the ids; absurd null ids get none."""
    return max([0, *(block for block in ids if block < 10**4)]) + 1 + slack


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
        if side.null(g) is not None and rng.random() < 0.6:
            for i in range(len(ids)):
                if rng.random() < 0.3:
                    ids[i] = side.null(g)
        now = replace(scenario, target=replace(side, blocks=tuple(blocks)))
        due = set(((now.due(g) - side.first(g)) // side.tokens_per_block(g)).tolist())
        for i in range(len(ids)):
            if i not in due and ids[i] != side.null(g) and rng.random() < 0.3:
                ids[i] = rng.choice(side.blocks[g])
    return replace(side, blocks=tuple(blocks))


def _classes(scenario: Scenario) -> Iterator[str]:
    """Name the properties of a scenario that make transfers hard."""
    source, target = scenario.engines
    begin, end = scenario.tokens
    small, large = sorted((source.tp_size, target.tp_size))
    if large % small:
        yield "non-divisible TP"
    for engine in scenario.engines:
        if any(engine.tp_size > group.num_kv_heads for group in engine.model.groups):
            yield "replicas"
    for g, group in enumerate(target.model.groups):
        due = scenario.due(g)
        earliest = max(begin, scenario.target.first(g))
        if group.sliding_window > 0 and earliest < end - group.sliding_window:
            yield "active window"
        size = scenario.target.tokens_per_block(g)
        listed = scenario.target.blocks[g]
        covered = range(max(begin - scenario.target.first(g), 0), end - scenario.target.first(g))
        null = scenario.target.null(g)
        if null is not None and any(listed[i // size] == null for i in covered):
            yield "null target blocks"
        for h, other in enumerate(source.model.groups):
            if len(due) == 0 or not set(group.layers).intersection(other.layers):
                continue
            sizes = sorted((size, scenario.source.tokens_per_block(h)))
            if sizes[1] % sizes[0]:
                yield "non-dividing block sizes"
            if any(position % size for position in (begin, end) for size in sizes):
                yield "partial tail"
            if scenario.target.first(g) != scenario.source.first(h):
                yield "differing first tokens"


def item_bytes(side: Side, g: int) -> int:
    """Return the item size of group `g`'s tensors."""
    return ITEM_BYTES[side.engine.model.groups[g].dtype]


def allocate(
    side: Side, rank: int, rng: random.Random, num_blocks: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Return a rank's tensors: dense when `num_blocks` is given, else with any memory behind them.

    They may be padded, begin anywhere, be interleaved in one allocation, or, where no id is in
    two lists, share memory between groups.
    """
    rank_slots = slots(side.engine, rank)
    counts = side.num_blocks if num_blocks is None else num_blocks
    shapes, kinds = [], []
    for slot in rank_slots:
        *outer, row = tensor_shape(side.engine, rank, slot, counts[slot.group])
        size = item_bytes(side, slot.group)
        shapes.append((*outer, row // size))
        kinds.append(np.dtype(f"u{size}"))
    if num_blocks is not None:
        return [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    tensors = _interleaved(rng, shapes, kinds) if rng.random() < 0.25 else None
    if tensors is None:
        padded = rng.random() < 0.6
        tensors = [
            _padded(rng, shape, kind, padded) for shape, kind in zip(shapes, kinds, strict=True)
        ]
    return _aliased(rank_slots, tensors) if side.aliased else tensors


def _padded(rng: random.Random, shape: tuple[int, ...], kind: np.dtype, padded: bool) -> np.ndarray:
    """Return a tensor whose every stride may be a little larger than it has to be."""
    strides, span = [], 1
    for size in reversed(shape):
        strides.insert(0, span)
        span *= size
        if padded and rng.random() < 0.4:
            span += rng.randrange(4)
    start = rng.randrange(8)
    memory = np.zeros(start + span, kind)
    item_strides = [stride * kind.itemsize for stride in strides]
    return as_strided(memory[start:], shape=shape, strides=item_strides)


def _interleaved(
    rng: random.Random, shapes: Sequence[tuple[int, ...]], kinds: Sequence[np.dtype]
) -> list[np.ndarray] | None:
    """Return tensors that take turns along their outermost axis, where theirs are all alike."""
    if len({shape[0] for shape in shapes}) != 1 or len(set(kinds)) != 1:
        return None
    inner = [math.prod(shape[1:]) for shape in shapes]
    turn = sum(inner) + rng.randrange(3)
    memory = np.zeros((shapes[0][0], turn), kinds[0])
    tensors, begin = [], 0
    for shape, size in zip(shapes, inner, strict=True):
        part = memory[:, begin : begin + size]
        steps = [math.prod(shape[axis + 1 :]) * memory.itemsize for axis in range(len(shape))]
        strides = [memory.strides[0], *steps[1:]]
        tensors.append(as_strided(part, shape=shape, strides=strides))
        begin += size
    return tensors


def _aliased(rank_slots: Sequence[Any], tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Let groups share tensors of equal shape and type, as hybrid engines do."""
    turns: Counter[Any] = Counter()
    first: dict[Any, np.ndarray] = {}
    result = []
    for slot, tensor in zip(rank_slots, tensors, strict=True):
        likeness = (tensor.shape, tensor.dtype.str)
        key = (*likeness, turns[(slot.group, *likeness)])
        turns[(slot.group, *likeness)] += 1
        result.append(first.setdefault(key, tensor))
    return result


def axes_handed_over(
    side: Side, rank: int, tensors: Sequence[np.ndarray], rng: random.Random
) -> tuple[list[np.ndarray], str | tuple[str, ...]]:
    """Return the tensors with dimensions in other orders than memory's, and the names of those."""
    memory = [axes_of(side.engine, g) for g in range(len(side.engine.model.groups))]
    names = ["".join(rng.sample(letters, len(letters))) for letters in memory]
    views = []
    for slot, tensor in zip(slots(side.engine, rank), tensors, strict=True):
        order = [memory[slot.group].index(letter) for letter in names[slot.group]]
        views.append(tensor.transpose(order))
    return views, names[0] if len(names) == 1 else tuple(names)
