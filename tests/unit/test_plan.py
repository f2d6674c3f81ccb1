"""Planning one request: block lists, what is due of them, and every way to state them wrongly."""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch
from engines import attention_model, make_engine, rows, source_cache, target_cache

from kvferry import AttentionGroup, ModelSpec, Route
from kvferry.errors import AlignmentError, BlockRangeError, KVFerryError, OverlapError

SOURCE, TARGET = make_engine("source"), make_engine("target")
ROUTE = Route(SOURCE, TARGET)
BLOCK_BYTES = 4 * 2 * 8 * 2
TOKEN_BYTES = BLOCK_BYTES // 4


def moved(plan, source=SOURCE, target=TARGET, blocks=10):
    """(source block, target block) or, within blocks, (source token, target token, tokens)."""
    found = rows(plan.descriptors(source_cache(source, 0, blocks), target_cache(target, 0, blocks)))
    return [
        (read // TOKEN_BYTES, written // TOKEN_BYTES, length // TOKEN_BYTES)
        for _, read, _, written, length in found
    ]


def engines(source_fields=None, target_fields=None, **model_fields):
    model = attention_model(**model_fields)
    return (
        make_engine("source", model, **(source_fields or {})),
        make_engine("target", model, **(target_fields or {})),
    )


AS_IDS = {
    "list": list,
    "tuple": tuple,
    "int16": lambda ids: np.array(ids, np.int16),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big endian": lambda ids: np.array(ids, ">i8"),
    "big endian unsigned": lambda ids: np.array(ids, ">u4"),
    "backwards": lambda ids: np.array(ids[::-1])[::-1],
    "every other": lambda ids: np.array([[i, 99] for i in ids])[:, 0],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), np.int64),
    "unaligned": lambda ids: np.frombuffer(b"\0" + np.array(ids).tobytes(), np.int64, offset=1),
    "packed record": lambda ids: np.array([(1, i) for i in ids], [("a", "i1"), ("b", "i8")])["b"],
    "packed narrow record": lambda ids: np.array([(1, i) for i in ids], [("a", "i1"), ("b", "i4")])["b"],
    "packed unsigned record": lambda ids: np.array([(1, i) for i in ids], [("a", "i1"), ("b", "u8")])["b"],
    "list of numpy": lambda ids: [np.int32(i) for i in ids],
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch int64": lambda ids: torch.tensor(ids),
    "torch uint8": lambda ids: torch.tensor(ids, dtype=torch.uint8),
    "torch strided": lambda ids: torch.tensor([[i, 99] for i in ids])[:, 0],
    "list of torch": lambda ids: list(torch.tensor(ids)),
    "array": lambda ids: array.array("l", ids),
    "memoryview": lambda ids: memoryview(array.array("i", ids)),
}


@pytest.mark.parametrize("as_ids", AS_IDS.values(), ids=AS_IDS.keys())
def test_ids_come_in_any_integer_container(as_ids):
    ids = [7, 3, 1, 8]
    plan = ROUTE.plan(0, [as_ids(ids)], [as_ids([2, 0, 5, 9])], tokens=(0, 16))
    assert moved(plan) == [(12, 0, 4), (28, 8, 4), (4, 20, 4), (32, 36, 4)]
    assert ROUTE.plan(0, (as_ids(ids),), (as_ids([2, 0, 5, 9]),), tokens=(0, 16)).num_bytes == 4 * BLOCK_BYTES


def test_ids_may_be_ranges():
    plan = ROUTE.plan(0, [range(7, 3, -1)], [range(0, 8, 2)], tokens=(0, 16))
    assert moved(plan) == [(28, 0, 4), (24, 8, 4), (20, 16, 4), (16, 24, 4)]


@pytest.mark.parametrize(
    "empty", [[], (), range(0), np.array([]), np.array([], np.int32), torch.tensor([])], ids=repr
)
def test_lists_may_be_empty_where_nothing_is_due(empty):
    plan = ROUTE.plan(0, [empty], [empty], tokens=(4, 4))
    assert (plan.pairs, plan.num_bytes, plan.notify_only) == ((), 0, (0,))


NO_LISTS = [None, 5, {0}, {0: 1}, "0", b"0", 1.0, np.array(0), np.array([[0]]), iter([0]), object()]


@pytest.mark.parametrize("ids", NO_LISTS, ids=lambda ids: type(ids).__name__)
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_no_list_of_ids_is_refused(side, ids):
    lists = {"source_blocks": [[0]], "target_blocks": [[0]], f"{side}_blocks": [ids]}
    with pytest.raises(ValueError, match=rf"{side}_blocks\[0\]"):
        ROUTE.plan(0, **lists, tokens=(0, 4))


@pytest.mark.parametrize(
    "ids",
    [[None], [1.0], ["0"], [[0]], [(0,)], [float("nan")], [object()], [b"0"], [np.float64(0)]]
    + [np.array([0.0]), np.array([True]), np.array(["0"]), np.array([0], object), np.array([0], "M8[s]")]
    + [torch.tensor([0.0]), torch.tensor([True]), torch.tensor([0.0], requires_grad=True)],
    ids=repr,
)
def test_what_is_no_id_is_refused(ids):
    with pytest.raises(ValueError, match=r"source_blocks\[0\]"):
        ROUTE.plan(0, [ids], [[0]], tokens=(0, 4))


@pytest.mark.parametrize("wrong", [None, 5, [], [[0], [0]], object()], ids=repr)
@pytest.mark.parametrize("side", ["source", "target"])
def test_there_is_one_list_a_group(side, wrong):
    lists = {"source_blocks": [[0]], "target_blocks": [[0]], f"{side}_blocks": wrong}
    with pytest.raises(ValueError, match=f"{side}_blocks"):
        ROUTE.plan(0, **lists, tokens=(0, 4))


@pytest.mark.parametrize("huge", [2**63, 2**64 - 1, -(2**63) - 1, 2**200, -(2**200)], ids=repr)
def test_ids_beyond_64_bits_do_not_exist(huge):
    with pytest.raises(BlockRangeError, match=f"block id {huge}"):
        ROUTE.plan(0, [[huge]], [[0]], tokens=(0, 4))
    if 0 < huge < 2**64:
        with pytest.raises(BlockRangeError, match=f"block id {huge}"):
            ROUTE.plan(0, [np.array([huge], np.uint64)], [[0]], tokens=(0, 4))


def test_a_list_longer_than_memory_is_refused_and_not_fatal():
    """A wrong range is a wrong argument; it must not end the process."""
    import subprocess
    import sys

    program = """
import resource
from kvferry import AttentionGroup, EngineSpec, ModelSpec, Route
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
engine = EngineSpec("a", ModelSpec((AttentionGroup((0,), 2, 4),)), 4, "BNHC")
try:
    Route(engine, engine).plan(0, [range(10**13)], [[0]], tokens=(0, 4))
except (ValueError, MemoryError):
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "refused\n")


@pytest.mark.parametrize("side", ["source", "target"])
def test_negative_ids_fail_whether_due_or_not(side):
    lists = {"source_blocks": [[1, 2, 3]], "target_blocks": [[4, 5, 6]]}
    for place in range(3):
        wrong = {**lists, f"{side}_blocks": [list(lists[f"{side}_blocks"][0])]}
        wrong[f"{side}_blocks"][0][place] = -1
        with pytest.raises(BlockRangeError, match=f"block id -1 of group 0 .*{side}"):
            ROUTE.plan(0, **wrong, tokens=(4, 8))


@pytest.mark.parametrize("side", ["source", "target"])
def test_known_upper_bounds_are_checked_in_plan(side):
    bounded = Route(*engines(**{f"{side}_fields": {"num_blocks": 10}}))
    lists = {"source_blocks": [[9, 2]], "target_blocks": [[9, 5]]}
    bounded.plan(0, **lists, tokens=(0, 4))
    lists[f"{side}_blocks"] = [[9, 10]]
    with pytest.raises(BlockRangeError, match=rf"block id 10 of group 0 .*{side}.* \[0, 10\)") as caught:
        bounded.plan(0, **lists, tokens=(0, 4))  # block 10 is not due
    assert isinstance(caught.value, (ValueError, IndexError)) and isinstance(caught.value, KVFerryError)
    assert isinstance(caught.value, IndexError)


def test_unknown_upper_bounds_are_checked_when_tensors_are_bound():
    plan = ROUTE.plan(0, [[10]], [[2]], tokens=(0, 4))
    for run in (plan.descriptors, plan.copy):
        with pytest.raises(BlockRangeError, match=r"block id 10 of group 0 .*source.* \[0, 10\)"):
            run(source_cache(SOURCE), target_cache(TARGET))
    plan = ROUTE.plan(0, [[2]], [[2**63 - 1]], tokens=(0, 4))
    with pytest.raises(BlockRangeError, match=r"block id 9223372036854775807 .*target"):
        plan.copy(source_cache(SOURCE), target_cache(TARGET))
    # An id that is not due is never looked up.
    ROUTE.plan(0, [[2, 99]], [[3, 99]], tokens=(0, 4)).copy(source_cache(SOURCE), target_cache(TARGET))


@pytest.mark.parametrize(
    "tokens",
    [None, 5, (), (0,), (0, 4, 8), "04", (4, 0), (1, 0), (-1, 4), (-4, -1), (0, -1), (0.0, 4.0), (None, 4)]
    + [(0, float("nan")), (0, float("inf")), ("0", "4"), (0, 2**62 + 1), (0, 2**63), (2**200, 2**201)]
    + [((0, 4), 8), {0: 4}],
    ids=repr,
)
def test_token_ranges_are_checked(tokens):
    with pytest.raises(ValueError, match="token"):
        ROUTE.plan(0, [[0]], [[0]], tokens=tokens)


def test_token_ranges_may_be_lists_or_hold_numpy_integers():
    for tokens in ((np.int64(0), np.int32(4)), [0, 4]):
        assert ROUTE.plan(0, [[0]], [[0]], tokens=tokens).num_bytes == BLOCK_BYTES


def test_extreme_ranges_do_not_take_long():
    with pytest.raises(BlockRangeError, match=f"needs {2**60} block ids .* got 1"):
        ROUTE.plan(0, [[1]], [[2]], tokens=(0, 2**62))
    end = {"tokens": (2**62 - 3, 2**62), "source_first_token": 2**62 - 4, "target_first_token": 2**62 - 4}
    assert moved(ROUTE.plan(0, [[1]], [[2]], **end)) == [(5, 9, 3)]
    ids = np.arange(10**6)
    assert ROUTE.plan(0, [ids], [ids[::-1]], tokens=(1, 4 * 10**6)).num_bytes == (4 * 10**6 - 1) * TOKEN_BYTES


@pytest.mark.parametrize(
    "first",
    [-4, 1.0, "0", float("nan"), (), (0, 0), (None,), (1.0,), ("0",), 2**63, 2**200, (2**200,), object()],
    ids=repr,
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_first_tokens_are_checked(side, first):
    with pytest.raises(ValueError, match=f"{side}_first_token"):
        ROUTE.plan(0, [[0]], [[0]], tokens=(0, 0), **{f"{side}_first_token": first})


@pytest.mark.parametrize("first", [1, 2, 3, 5, (6,)])
@pytest.mark.parametrize("side", ["source", "target"])
def test_first_tokens_begin_blocks(side, first):
    number = first if isinstance(first, int) else first[0]
    words = rf"first token {number} of group 0 .*{side}.* does not align with its 4 tokens"
    with pytest.raises(AlignmentError, match=words) as caught:
        ROUTE.plan(0, [[0]], [[0]], tokens=(0, 0), **{f"{side}_first_token": first})
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVFerryError)


@pytest.mark.parametrize("first", [4, (4,), [4], np.int64(4), np.array([4])], ids=repr)
def test_first_tokens_are_given_once_or_a_group(first):
    plan = ROUTE.plan(0, [[3]], [[5]], tokens=(0, 8), source_first_token=first, target_first_token=first)
    assert moved(plan) == [(12, 20, 4)]


def test_ranges_may_begin_and_end_inside_blocks():
    # Tokens 3 to 5 lie in slot 3 of the first block and slots 0 and 1 of the second.
    plan = ROUTE.plan(0, [[7, 2]], [[1, 9]], tokens=(3, 6))
    assert moved(plan) == [(31, 7, 1), (8, 36, 2)]


def test_what_the_target_holds_is_not_due():
    plan = ROUTE.plan(0, [[7, 2, 5]], [[9]], tokens=(0, 11), target_first_token=8)
    assert moved(plan) == [(20, 36, 3)]
    assert ROUTE.plan(0, [[7]], [[9]], tokens=(0, 4), target_first_token=8).pairs == ()


def test_target_null_blocks_are_not_due():
    route = Route(*engines({"null_block_id": -1}, {"null_block_id": 0}))
    plan = route.plan(0, [[7, -1, 5]], [[3, 0, 4]], tokens=(0, 12))
    assert moved(plan, route.source, route.target) == [(28, 12, 4), (20, 16, 4)]
    with pytest.raises(BlockRangeError, match=r"token 4 of group 0 .*source.* null block"):
        route.plan(0, [[7, -1, 5]], [[3, 6, 4]], tokens=(0, 12))
    with pytest.raises(BlockRangeError, match=r"token 5 of group 0 .*source.* null block"):
        route.plan(0, [[7, -1, 5]], [[3, 6, 4]], tokens=(5, 12))
    # A source null block that is not due is nobody's concern, and block 0 is an ordinary source.
    assert moved(route.plan(0, [[-1, 0]], [[1, 2]], tokens=(4, 8)), *engines_of(route)) == [(0, 8, 4)]
    with pytest.raises(BlockRangeError, match="block id -1 .*target"):
        route.plan(0, [[7]], [[-1]], tokens=(0, 4))


def engines_of(route):
    return route.source, route.target


def test_target_null_blocks_need_no_source_at_all():
    route = Route(*engines(target_fields={"null_block_id": 0}))
    plan = route.plan(0, [[7]], [[3, 0, 0]], tokens=(0, 12))
    assert plan.num_bytes == BLOCK_BYTES


@pytest.mark.parametrize(
    ("window", "tokens", "expected"),
    [
        (4, (0, 12), [(28, 36, 4)]),  # the last block only
        (6, (0, 12), [(30, 38, 2), (28, 40, 4)]),
        (1, (0, 12), [(31, 39, 1)]),
        (100, (0, 12), None),
        (6, (7, 12), None),
        (6, (10, 12), None),
        (3, (0, 5), None),
    ],
)
def test_a_window_makes_the_last_tokens_due(window, tokens, expected):
    route = Route(*engines(sliding_window=window))
    source_ids, target_ids = [1, 2, 3], [4, 6, 8]
    plan = route.plan(0, [source_ids], [target_ids], tokens=tokens)
    begin = max(tokens[0], tokens[1] - window)
    assert plan.num_bytes == (tokens[1] - begin) * TOKEN_BYTES
    read = [4 * source_ids[t // 4] + t % 4 for t in range(begin, tokens[1])]
    written = [4 * target_ids[t // 4] + t % 4 for t in range(begin, tokens[1])]
    seen = [
        (first_read + i, first_written + i)
        for first_read, first_written, count in moved(plan, *engines_of(route))
        for i in range(count)
    ]
    assert sorted(seen) == sorted(zip(read, written, strict=True))
    assert expected is None or len(expected) >= 1


def test_blocks_before_the_window_may_be_null_or_missing_ids():
    source, target = engines({"null_block_id": 0}, {"null_block_id": 0}, sliding_window=5)
    route = Route(source, target)
    plan = route.plan(0, [[0, 0, 2, 3]], [[0, 0, 4, 6]], tokens=(0, 16))
    # Tokens 11 to 15: the last slot of the third block, and the fourth.
    assert moved(plan, source, target) == [(11, 19, 1), (12, 24, 4)]
    trimmed = route.plan(
        0, [[2, 3]], [[4, 6]], tokens=(0, 16), source_first_token=8, target_first_token=8
    )
    assert moved(trimmed, source, target) == moved(plan, source, target)


def test_a_source_list_that_begins_too_late_is_refused():
    with pytest.raises(BlockRangeError, match=r"group 0 .*source.* begin at token 4"):
        ROUTE.plan(0, [[1]], [[2, 3]], tokens=(0, 8), source_first_token=4)
    assert ROUTE.plan(0, [[1]], [[3]], tokens=(0, 8), source_first_token=4, target_first_token=4).num_bytes


@pytest.mark.parametrize("side", ["source", "target"])
def test_too_few_ids_are_refused(side):
    lists = {"source_blocks": [[1, 2, 3]], "target_blocks": [[4, 5, 6]]}
    lists[f"{side}_blocks"] = [[1, 2]]
    ROUTE.plan(0, **lists, tokens=(0, 8))
    for tokens in ((0, 9), (8, 9)):
        with pytest.raises(BlockRangeError, match=rf"group 0 .*{side}.* needs 3 .* got 2"):
            ROUTE.plan(0, **lists, tokens=tokens)


def test_surplus_ids_are_ignored():
    assert moved(ROUTE.plan(0, [[1, 2, 3, 4]], [[5, 6, 7]], tokens=(0, 4))) == [(4, 20, 4)]


def test_lists_are_checked_for_every_group_whichever_rank():
    """Every target rank of a request sees the same verdict."""
    group = {"num_kv_heads": 2, "head_dim": 4}
    model = ModelSpec((AttentionGroup((0,), **group), AttentionGroup((1,), **group)))
    wide = [make_engine(name, model, tp_size=2) for name in ("source", "target")]
    route = Route(*wide)
    for rank in range(2):
        with pytest.raises(BlockRangeError, match="group 1"):
            route.plan(rank, [[1], []], [[1], [1]], tokens=(0, 4))
        with pytest.raises(OverlapError, match="group 1"):
            route.plan(rank, [[1, 2], [1, 2]], [[1, 2], [1, 1]], tokens=(0, 8))
        with pytest.raises(BlockRangeError, match="block id -5 of group 1"):
            route.plan(rank, [[1], [1]], [[1], [1, -5]], tokens=(0, 4))


def test_groups_have_their_own_block_sizes():
    """Ranges count tokens, so that 64, 4 and 8 tokens a block need 4, 64 and 32 ids."""
    group = {"num_kv_heads": 1, "head_dim": 4, "dtype": "float16"}
    model = ModelSpec(tuple(AttentionGroup((layer,), **group) for layer in range(3)))
    source = make_engine("source", model, (64, 4, 8))
    target = make_engine("target", model, (16, 32, 8))
    lists = [range(4), range(64), range(32)], [range(16), range(8), range(32)]
    assert Route(source, target).plan(0, *lists, tokens=(0, 256)).num_bytes == 3 * 256 * 16
    for group_index, needed in enumerate((4, 64, 32)):
        short = list(lists[0])
        short[group_index] = short[group_index][:-1]
        with pytest.raises(BlockRangeError, match=f"group {group_index} .* needs {needed} .* got {needed - 1}"):
            Route(source, target).plan(0, short, lists[1], tokens=(0, 256))


def test_slots_of_several_tokens_align_ranges():
    source, target = engines(tokens_per_slot=2)
    route = Route(source, target)
    plan = route.plan(0, [[1, 2]], [[3, 4]], tokens=(2, 6))
    assert plan.num_bytes == 2 * TOKEN_BYTES  # two slots
    for tokens in ((1, 6), (2, 5)):
        with pytest.raises(AlignmentError, match=rf"\[{tokens[0]}, {tokens[1]}\) .* 2 tokens a slot of group 0"):
            route.plan(0, [[1, 2]], [[3, 4]], tokens=tokens)


def test_the_same_inputs_give_the_same_plan():
    plans = [ROUTE.plan(0, [[7, 2]], [[1, 9]], tokens=(3, 6)) for _ in range(3)]
    assert len({repr(plan) for plan in plans}) == 1
    assert moved(plans[0]) == moved(plans[1]) == moved(plans[2])
    assert repr(plans[0]) == f"Plan(target_rank=0, pairs=[(0, 0)], num_bytes={3 * TOKEN_BYTES})"


def test_messages_do_not_repeat_whole_lists():
    with pytest.raises(ValueError, match="tokens") as caught:
        ROUTE.plan(0, [[0]], [[0]], tokens=tuple(range(10**5)))
    assert len(str(caught.value)) < 1000


def test_explain_says_what_moves_and_how():
    source, target = engines({"tp_size": 2}, layers=3)
    plan = Route(source, target).plan(0, [[7, 2]], [[1, 9]], tokens=(0, 7))
    caches = [source_cache(source, rank) for rank in range(2)], target_cache(target)
    for explained in (plan.explain(), plan.explain(*caches), plan.explain(sources=caches[0][1])):
        assert explained.num_bytes == plan.num_bytes == 3 * 7 * TOKEN_BYTES
        # One head of 16 bytes a token is contiguous on the target.
        assert explained.num_fragments == 2 * 3 * 7
        assert [(pair.source_rank, pair.target_rank) for pair in explained.pairs] == [(0, 0), (1, 0)]
        for pair in explained.pairs:
            assert (pair.min_bytes, pair.max_bytes, pair.mean_bytes) == (16, 16, 16)
            assert pair.num_bytes == 3 * 7 * 16
        (group,) = explained.groups
        assert (group.num_layers, group.num_tokens, group.num_pieces) == (3, 7, 2)
        printed = str(explained)
        assert all(word in printed for word in ("source", "target", "3 layers", "7 tokens", "42 fragments"))


def test_explain_names_who_is_only_notified():
    model = attention_model(heads=1)
    wide = make_engine("source", model, tp_size=4)
    plan = Route(wide, make_engine("target", model)).plan(0, [[1]], [[2]], tokens=(0, 4))
    assert plan.explain().notify_only == (1, 2, 3)
    assert "1, 2, 3" in str(plan.explain())


def test_an_empty_plan_explains_itself():
    explained = ROUTE.plan(0, [[]], [[]], tokens=(0, 0)).explain()
    assert (explained.num_bytes, explained.num_fragments, explained.pairs) == (0, 0, ())
    assert "0 B" in str(explained)


@pytest.mark.parametrize("wrong", [5, "cache", [None], [5], object()], ids=repr)
def test_explain_wants_caches(wrong):
    plan = ROUTE.plan(0, [[1]], [[2]], tokens=(0, 4))
    with pytest.raises(TypeError, match="KVCache"):
        plan.explain(wrong)
    with pytest.raises(TypeError, match="KVCache"):
        plan.explain(None, wrong)
