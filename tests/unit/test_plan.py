"""Planning one request: block lists, what is due of them, and every way to state them wrongly."""

from __future__ import annotations

import numpy as np
import pytest
from engines import (
    BLOCK_BYTES,
    TOKEN_BYTES,
    engine_pair,
    label,
    make_engine,
    moved,
)

from kvferry import AttentionGroup, ModelSpec, Route
from kvferry.errors import AlignmentError, BlockRangeError, KVFerryError, OverlapError

SOURCE, TARGET = make_engine("source"), make_engine("target")
ROUTE = Route(SOURCE, TARGET)


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        5,
        (),
        (0,),
        (0, 4, 8),
        "04",
        (4, 0),
        (1, 0),
        (-1, 4),
        (-4, -1),
        (0, -1),
        (0.0, 4.0),
        (None, 4),
        (0, float("nan")),
        (0, float("inf")),
        ("0", "4"),
        (0, 2**62 + 1),
        (0, 2**63),
        (2**200, 2**201),
        ((0, 4), 8),
        {0: 4},
    ],
    ids=label,
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
    end = {
        "tokens": (2**62 - 3, 2**62),
        "source_first_token": 2**62 - 4,
        "target_first_token": 2**62 - 4,
    }
    assert moved(ROUTE.plan(0, [[1]], [[2]], **end), SOURCE, TARGET) == [(5, 9, 3)]
    ids = np.arange(10**6)
    assert (
        ROUTE.plan(0, [ids], [ids[::-1]], tokens=(1, 4 * 10**6)).num_bytes
        == (4 * 10**6 - 1) * TOKEN_BYTES
    )


@pytest.mark.parametrize(
    "first",
    [
        -4,
        1.0,
        "0",
        float("nan"),
        (),
        (0, 0),
        (None,),
        (1.0,),
        ("0",),
        2**63,
        2**200,
        (2**200,),
        object(),
    ],
    ids=label,
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


@pytest.mark.parametrize("first", [4, (4,), [4], np.int64(4), np.array([4])], ids=label)
def test_first_tokens_are_given_once_or_a_group(first):
    plan = ROUTE.plan(
        0, [[3]], [[5]], tokens=(0, 8), source_first_token=first, target_first_token=first
    )
    assert moved(plan, SOURCE, TARGET) == [(12, 20, 4)]


def test_ranges_may_begin_and_end_inside_blocks():
    # Tokens 3 to 5 lie in slot 3 of the first block and slots 0 and 1 of the second.
    plan = ROUTE.plan(0, [[7, 2]], [[1, 9]], tokens=(3, 6))
    assert moved(plan, SOURCE, TARGET) == [(31, 7, 1), (8, 36, 2)]


def test_what_the_target_holds_is_not_due():
    plan = ROUTE.plan(0, [[7, 2, 5]], [[9]], tokens=(0, 11), target_first_token=8)
    assert moved(plan, SOURCE, TARGET) == [(20, 36, 3)]
    assert ROUTE.plan(0, [[7]], [[9]], tokens=(0, 4), target_first_token=8).pairs == ()


def test_target_null_blocks_are_not_due():
    route = Route(*engine_pair({"null_block_id": -1}, {"null_block_id": 0}))
    plan = route.plan(0, [[7, -1, 5]], [[3, 0, 4]], tokens=(0, 12))
    assert moved(plan, route.source, route.target) == [(28, 12, 4), (20, 16, 4)]
    with pytest.raises(BlockRangeError, match=r"token 4 of group 0 .*source.* null block"):
        route.plan(0, [[7, -1, 5]], [[3, 6, 4]], tokens=(0, 12))
    with pytest.raises(BlockRangeError, match=r"token 5 of group 0 .*source.* null block"):
        route.plan(0, [[7, -1, 5]], [[3, 6, 4]], tokens=(5, 12))
    # A source null block that is not due is nobody's concern, and block 0 is an ordinary source.
    assert moved(route.plan(0, [[-1, 0]], [[1, 2]], tokens=(4, 8)), *engines_of(route)) == [
        (0, 8, 4)
    ]
    with pytest.raises(BlockRangeError, match=r"block id -1 .*target"):
        route.plan(0, [[7]], [[-1]], tokens=(0, 4))


def engines_of(route):
    return route.source, route.target


def test_target_null_blocks_need_no_source_at_all():
    route = Route(*engine_pair(target={"null_block_id": 0}))
    plan = route.plan(0, [[7]], [[3, 0, 0]], tokens=(0, 12))
    assert plan.num_bytes == BLOCK_BYTES


@pytest.mark.parametrize(
    ("window", "tokens"),
    [
        (4, (0, 12)),
        (6, (0, 12)),
        (1, (0, 12)),
        (100, (0, 12)),
        (6, (7, 12)),
        (6, (10, 12)),
        (3, (0, 5)),
    ],
)
def test_a_window_makes_the_last_tokens_due(window, tokens):
    route = Route(*engine_pair(sliding_window=window))
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


def test_blocks_before_the_window_may_be_null_or_missing_ids():
    source, target = engine_pair({"null_block_id": 0}, {"null_block_id": 0}, sliding_window=5)
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
    assert ROUTE.plan(
        0, [[1]], [[3]], tokens=(0, 8), source_first_token=4, target_first_token=4
    ).num_bytes


@pytest.mark.parametrize("side", ["source", "target"])
def test_too_few_ids_are_refused(side):
    lists = {"source_blocks": [[1, 2, 3]], "target_blocks": [[4, 5, 6]]}
    lists[f"{side}_blocks"] = [[1, 2]]
    ROUTE.plan(0, **lists, tokens=(0, 8))
    for tokens in ((0, 9), (8, 9)):
        with pytest.raises(BlockRangeError, match=rf"group 0 .*{side}.* needs 3 .* got 2"):
            ROUTE.plan(0, **lists, tokens=tokens)


def test_surplus_ids_are_ignored():
    assert moved(ROUTE.plan(0, [[1, 2, 3, 4]], [[5, 6, 7]], tokens=(0, 4)), SOURCE, TARGET) == [
        (4, 20, 4)
    ]


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
        with pytest.raises(
            BlockRangeError, match=f"group {group_index} .* needs {needed} .* got {needed - 1}"
        ):
            Route(source, target).plan(0, short, lists[1], tokens=(0, 256))


def test_slots_of_several_tokens_align_ranges():
    source, target = engine_pair(tokens_per_slot=2)
    route = Route(source, target)
    plan = route.plan(0, [[1, 2]], [[3, 4]], tokens=(2, 6))
    assert plan.num_bytes == 2 * TOKEN_BYTES  # two slots
    for tokens in ((1, 6), (2, 5)):
        with pytest.raises(
            AlignmentError, match=rf"\[{tokens[0]}, {tokens[1]}\) .* 2 tokens a slot of group 0"
        ):
            route.plan(0, [[1, 2]], [[3, 4]], tokens=tokens)


def test_the_same_inputs_give_the_same_plan():
    plans = [ROUTE.plan(0, [[7, 2]], [[1, 9]], tokens=(3, 6)) for _ in range(3)]
    assert len({repr(plan) for plan in plans}) == 1
    assert (
        moved(plans[0], SOURCE, TARGET)
        == moved(plans[1], SOURCE, TARGET)
        == moved(plans[2], SOURCE, TARGET)
    )
    assert repr(plans[0]) == f"Plan(target_rank=0, pairs=[(0, 0)], num_bytes={3 * TOKEN_BYTES})"


def test_messages_do_not_repeat_whole_lists():
    with pytest.raises(ValueError, match="tokens") as caught:
        ROUTE.plan(0, [[0]], [[0]], tokens=tuple(range(10**5)))
    assert len(str(caught.value)) < 1000
