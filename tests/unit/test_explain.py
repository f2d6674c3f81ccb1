"""Explanations: a plan in words and numbers."""

from __future__ import annotations

import pytest
from engines import (
    TOKEN_BYTES,
    attention_model,
    engine_pair,
    label,
    make_engine,
    source_cache,
    target_cache,
)

from kvferry import Route

SOURCE, TARGET = make_engine("source"), make_engine("target")
ROUTE = Route(SOURCE, TARGET)


def test_explain_says_what_moves_and_how():
    source, target = engine_pair({"tp_size": 2}, layers=3)
    plan = Route(source, target).plan(0, [[7, 2]], [[1, 9]], tokens=(0, 7))
    caches = [source_cache(source, rank) for rank in range(2)], target_cache(target)
    for explained in (plan.explain(), plan.explain(*caches), plan.explain(sources=caches[0][1])):
        assert explained.num_bytes == plan.num_bytes == 3 * 7 * TOKEN_BYTES
        # One head of 16 bytes a token is contiguous on the target.
        assert explained.num_fragments == 2 * 3 * 7
        assert [(pair.source_rank, pair.target_rank) for pair in explained.pairs] == [
            (0, 0),
            (1, 0),
        ]
        for pair in explained.pairs:
            assert (pair.min_bytes, pair.max_bytes, pair.mean_bytes) == (16, 16, 16)
            assert pair.num_bytes == 3 * 7 * 16
        (group,) = explained.groups
        assert (group.num_layers, group.num_tokens, group.num_stretches) == (3, 7, 2)
        printed = str(explained)
        assert all(
            word in printed for word in ("source", "target", "3 layers", "7 tokens", "42 fragments")
        )


def test_layers_are_said_to_be_the_engines_where_a_rank_holds_some():
    source, target = engine_pair(target={"pp_size": 2}, layers=4)
    explained = Route(source, target).plan(1, [[7]], [[1]], tokens=(0, 4)).explain()
    assert [group.num_layers for group in explained.groups] == [4]
    assert [transfer.num_layers for transfer in explained.transfers] == [2]
    assert "(attention): 4 layers in both engines, 4 tokens due" in str(explained)


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


@pytest.mark.parametrize("wrong", [5, "cache", [None], [5], object()], ids=label)
def test_explain_wants_caches(wrong):
    plan = ROUTE.plan(0, [[1]], [[2]], tokens=(0, 4))
    with pytest.raises(TypeError, match="KVCache"):
        plan.explain(wrong)
    with pytest.raises(TypeError, match="KVCache"):
        plan.explain(None, wrong)
