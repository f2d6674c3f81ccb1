"""Requests and descriptions from anywhere: a plan or a `ValueError`, in bounded memory.

`Route.plan` takes numbers that a peer has sent. Whatever these are, nothing panics, wraps around or
allocates by a number that it was told, and no descriptor reaches outside its tensors. The corpus in
``corpus/plan`` holds arguments, one file a request. To search longer than the tests do::

    KVFERRY_FUZZ_EXAMPLES=100000 python -m pytest tests/fuzz
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import EXAMPLES, bounded_memory

from kvferry import (
    AttentionGroup,
    EngineSpec,
    KVCache,
    LatentGroup,
    ModelSpec,
    RankDescription,
    Route,
    StateGroup,
    StatePart,
)

CORPUS = {path.stem: path for path in sorted(Path(__file__).parent.glob("corpus/plan/*.json"))}
BLOCKS = 10


def _routes() -> dict[str, Route]:
    """Make routes between engines that differ in one thing each, and one in all of them."""
    full = AttentionGroup((0, 1), num_kv_heads=3, head_dim=2, dtype="float16")
    window = AttentionGroup((2, 5), num_kv_heads=2, head_dim=2, dtype="int8", sliding_window=8)
    slots = AttentionGroup((3,), num_kv_heads=1, head_dim=4, v_head_dim=2, tokens_per_slot=2)
    latent = LatentGroup((4,), latent_dim=6, tokens_per_slot=4)
    conv = StatePart("conv", (4, 3), "bfloat16", shard_axis=0)
    state = StateGroup((1, 2), (conv, StatePart("all", (3,), "float32", shard_axis=None)))
    plain, hybrid = ModelSpec((full,)), ModelSpec((full, window, slots, latent, state))
    regrouped = hybrid.regroup([[5], [4], [2, 1], [1], [3], [2], [0]])
    far = 2**64 - 1
    pairs = {
        "plain": (
            EngineSpec("a", plain, 4, "BNHC"),
            EngineSpec("b", plain, 4, "BNHC"),
        ),
        "block sizes": (
            EngineSpec("a", plain, 6, "KBHND", tp_size=3),
            EngineSpec("b", plain, 4, "BNHD", tp_size=2),
        ),
        "null blocks": (
            EngineSpec("a", plain, 4, "BNHC", null_block_id=0, num_blocks=BLOCKS),
            EngineSpec("b", plain, 2, "BNHC", null_block_id=-1),
        ),
        "far null blocks": (
            EngineSpec("a", plain, 4, "BNHC", null_block_id=far),
            EngineSpec("b", plain, 4, "BNHC", null_block_id=-(2**63)),
        ),
        "ranks": (
            EngineSpec("a", hybrid, 16, "BHNC", tp_size=2, cp_size=2, cp_interleave=4),
            EngineSpec("b", hybrid, 8, "BHNC", pp_size=2, physical_blocks_per_block=2),
        ),
        "groups": (
            EngineSpec("a", hybrid, (4, 8, 6, 12, 0), "BNHC", null_block_id=(0, 1, None, -5, 7)),
            EngineSpec("b", regrouped, 8, "LBHNC", tp_size=2, num_blocks=(BLOCKS, *(None,) * 6)),
        ),
        "missing layers": (
            EngineSpec("a", hybrid, 8, "BNHC"),
            EngineSpec("b", plain, 1, "BNHC"),
        ),
        "huge blocks": (
            EngineSpec("a", plain, 2**31, "BNHC"),
            EngineSpec("b", plain, 2**31 - 1, "BNHC"),
        ),
    }  # fmt: skip
    return {name: Route(*pair, allow_missing_layers=True) for name, pair in pairs.items()}


ROUTES = _routes()
EDGES = [s * 2**p + d for s in (1, -1) for p in (31, 32, 61, 62, 63, 64, 200) for d in (-1, 0, 1)]


def describe(engine: EngineSpec, rank: int) -> RankDescription | None:
    """Describe small tensors of a rank; none where one block is too much for a test."""
    shapes = [(slot, slot.shape(2 * BLOCKS)) for slot in engine.tensor_slots(rank)]
    if any(np.prod(shape, dtype=float) > 1e6 for _, shape in shapes):
        return None
    unsigned = {1: "u1", 2: "u2", 4: "u4"}
    tensors = [np.zeros(shape, unsigned[slot.item_bytes]) for slot, shape in shapes]
    return KVCache(engine, rank, tensors).describe()


def extents(description: RankDescription) -> np.ndarray:
    """Return the bytes of each tensor, from its first to one past its last."""
    return np.array(
        [
            slot.item_bytes
            + sum((n - 1) * stride for n, stride in zip(slot.sizes, slot.strides, strict=True))
            for slot in description.slots
        ]
    )


def check_inside(columns, source: RankDescription, target: RankDescription) -> None:
    """Every descriptor lies in its tensors."""
    for side, description in (("source", source), ("target", target)):
        tensor, offset = getattr(columns, f"{side}_tensor"), getattr(columns, f"{side}_offset")
        assert (tensor >= 0).all() and (tensor < len(description.slots)).all()
        assert (offset >= 0).all() and (columns.length > 0).all()
        assert (offset + columns.length <= extents(description)[tensor]).all()


def check(*request, **named) -> None:
    """Plan what may be anything, and read everything off the plan."""
    with bounded_memory():
        _check(*request, **named)


def _check(route: Route, push: bool, rank, source_blocks, target_blocks, tokens, **firsts) -> None:
    make = route.plan_push if push else route.plan
    try:
        plan = make(rank, source_blocks, target_blocks, tokens, **firsts)
    except ValueError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert 0 < len(str(error)) < 1000
        return
    assert plan.num_bytes >= 0 and (plan.pairs or plan.num_bytes == 0)
    try:
        explanation = plan.explain()
        assert explanation.num_bytes == plan.num_bytes and str(explanation)
    except ValueError:
        pass  # dense tensors with room for the highest id may exceed 2^63 bytes
    for source_rank, target_rank in plan.pairs[:4]:
        source = describe(route.source, source_rank)
        target = describe(route.target, target_rank)
        if source is None or target is None:
            continue
        try:
            columns = plan.descriptors(source, target)
            loops = plan.loops(source, target)
        except ValueError:
            continue  # ids beyond the tensors' blocks
        check_inside(columns, source, target)
        assert columns.total_bytes == loops.total_bytes


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus(name):
    check(**_loaded(CORPUS[name]))


def _loaded(path: Path) -> dict:
    arguments = json.loads(path.read_text())
    return {**arguments, "route": ROUTES[arguments["route"]]}


def test_there_is_a_corpus():
    assert len(CORPUS) >= 8


def mostly(likely, other):
    """Draw from the former nine times in ten: with many arguments, most would else be refused."""
    return st.integers(0, 9).flatmap(lambda n: other if n == 9 else likely)


edges = st.sampled_from(EDGES)
ids = mostly(st.integers(0, 2 * BLOCKS), st.one_of(st.integers(-9, 99), edges))
small_ids = st.integers(0, 2 * BLOCKS)
arrays = st.builds(
    lambda values, dtype, step: np.array(values, dtype)[::step],
    st.lists(st.integers(0, 100), max_size=20),
    st.sampled_from(["i1", "u1", ">i2", "i4", "i8", "u8", ">i8", "f4", "?", "O"]),
    st.sampled_from([1, 2, -1]),
)
far_arrays = st.builds(
    lambda values: np.array(values, np.uint64),
    st.lists(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]), max_size=4),
)
block_lists = st.one_of(
    st.lists(small_ids, max_size=24, unique=True),
    st.lists(small_ids, max_size=24, unique=True),
    st.lists(ids, max_size=24),
    # What is not short is longer than any list may be, so that none of these takes long to refuse.
    st.builds(range, small_ids | edges, ids, st.sampled_from([1, 1, 3, -1])),
    arrays,
    far_arrays,
)
positions = mostly(
    st.integers(0, 6).map(lambda n: 4 * n),
    st.one_of(st.integers(-1, 48), st.integers(0, 2**62).map(lambda n: n & ~0xFFF), edges),
)


@st.composite
def ends(draw, route):
    """Draw whether to push, and a rank that mostly exists."""
    push = draw(st.booleans())
    count = (route.source if push else route.target).num_ranks
    return push, draw(mostly(st.integers(0, count - 1), st.integers(-1, 9) | edges))


@st.composite
def requests(draw):
    """Draw the arguments of a plan, each of them likely to be fine, so that all are reached."""
    name = draw(st.sampled_from(sorted(ROUTES)))
    route = ROUTES[name]
    groups = {side: len(getattr(route, side).model.groups) for side in ("source", "target")}
    lists = {
        side: [draw(block_lists) for _ in range(count + draw(st.sampled_from([0] * 29 + [-1, 1])))]
        for side, count in groups.items()
    }
    ordered = st.tuples(positions, positions).map(sorted)
    tokens = draw(mostly(ordered, st.lists(positions, max_size=4)))
    firsts = {
        f"{side}_first_token": draw(
            st.just(0) | positions | st.lists(positions, min_size=count, max_size=count)
        )
        for side, count in groups.items()
        if draw(st.booleans())
    }
    push, rank = draw(ends(route))
    return route, push, rank, lists["source"], lists["target"], tokens, firsts


@settings(max_examples=2 * EXAMPLES)
@given(requests())
def test_any_request(request):
    *arguments, firsts = request
    check(*arguments, **firsts)


@st.composite
def plausible_requests(draw):
    """Draw lists that cover the tokens, so that most of these are planned."""
    route = ROUTES[draw(st.sampled_from(sorted(ROUTES)))]
    tokens = tuple(sorted(4 * draw(st.integers(0, 10)) for _ in range(2)))
    lists = []
    for engine in (route.source, route.target):
        kinds = [isinstance(group, StateGroup) for group in engine.model.groups]
        numbers = draw(st.permutations(range(2 * BLOCKS)))
        lists.append([numbers[:1] if is_state else numbers for is_state in kinds])
    for changed in draw(st.lists(st.sampled_from(lists), max_size=1)):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(block_lists)
    return route, *draw(ends(route)), *lists, tokens


@settings(max_examples=EXAMPLES)
@given(plausible_requests())
def test_plausible_requests(request):
    check(*request)


def _plan_with_ends():
    route = ROUTES["ranks"]
    lists = [[[5, 2, 8], [5, 2, 8], [3, 1, 0], [4, 7, 9], [6]], [[1, 2, 3, 4, 5]] * 4 + [[6]]]
    plan = route.plan(0, *lists, tokens=(0, 32))
    source_rank, target_rank = plan.pairs[0]
    return plan, describe(route.source, source_rank), describe(route.target, target_rank)


PLAN, SOURCE, TARGET = _plan_with_ends()
anything = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 64), st.sampled_from(EDGES), st.floats(), st.text()
)
numbers = st.one_of(st.integers(-2, 64), st.sampled_from(EDGES))


@st.composite
def changed_descriptions(draw):
    """Change a description in a few fields of a few of its tensors, by type or by size."""
    description = draw(st.sampled_from([SOURCE, TARGET]))
    slots = list(description.slots)
    for _ in range(draw(st.integers(0, 3))):
        s = draw(st.integers(0, len(slots) - 1))
        numbered = ["address", "sizes", "strides", "item_bytes", "device"]
        field = draw(mostly(st.sampled_from(numbered), st.sampled_from(["name", "writable"])))
        value = getattr(slots[s], field)
        if isinstance(value, tuple) and value and draw(st.integers(0, 4)):
            value = list(value)
            at = draw(st.integers(0, len(value) - 1))
            value[at] = draw(numbers)
            if draw(st.integers(0, 4)) == 0:
                value[at:at] = [draw(numbers)] * draw(st.integers(0, 70))
            value = tuple(value)
        else:
            value = draw(mostly(numbers, anything | st.lists(anything, max_size=5)))
        slots[s] = msgspec.structs.replace(slots[s], **{field: value})
    how = draw(mostly(st.just("all"), st.sampled_from(["swap", "drop", "repeat", "other"])))
    if how == "swap":
        slots = draw(st.permutations(slots))
    elif how == "drop":
        slots.pop(draw(st.integers(0, len(slots) - 1)))
    elif how == "repeat":
        slots.append(slots[0])
    fields = {"slots": tuple(slots)}
    if how == "other":
        fields[draw(st.sampled_from(["engine_id", "rank", "slots"]))] = draw(anything)
    changed = msgspec.structs.replace(description, **fields)
    return (changed, TARGET) if description is SOURCE else (SOURCE, changed)


@settings(max_examples=2 * EXAMPLES)
@given(changed_descriptions())
def test_changed_descriptions(described):
    source, target = described
    try:
        with bounded_memory():
            columns = PLAN.descriptors(source, target)
            loops = PLAN.loops(source, target)
    except (ValueError, TypeError):
        return  # a `TypeError` only where no `RankDescription` could be meant
    check_inside(columns, source, target)
    assert columns.total_bytes == loops.total_bytes
    assert PLAN.explain([source], [target]).pairs
