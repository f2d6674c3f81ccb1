"""Pairing engines: who can exchange caches, who never can, and who reads from whom."""

from __future__ import annotations

import numpy as np
import pytest
from engines import attention_model, counting_tensors, label, make_engine, untouched_tensors

from kvferry import (
    AttentionGroup,
    EngineSpec,
    KVCache,
    LatentGroup,
    ModelSpec,
    Route,
)
from kvferry.errors import IncompatibleEnginesError, KVFerryError, TopologyError

SPLIT = {"num_kv_heads": 2, "head_dim": 4, "dtype": "float16"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 4}, "num_kv_heads 2 against 4"),
        ({"dim": 8}, "head_dim 4 against 8"),
        ({"v_head_dim": 2}, "v_head_dim 4 against 2"),
        ({"dtype": "bfloat16"}, "dtype float16 against bfloat16"),
        ({"dtype": "float32"}, "dtype float16 against float32"),
        ({"sliding_window": 64}, "sliding_window -1 against 64"),
        ({"tokens_per_slot": 2}, "tokens_per_slot 1 against 2"),
    ],
)
def test_models_that_differ_never_pair(fields, words):
    one = make_engine("one", attention_model(layers=3))
    other = make_engine("other", attention_model(layers=3, **fields))
    with pytest.raises(IncompatibleEnginesError, match=words) as caught:
        Route(one, other, allow_missing_layers=True)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVFerryError)
    assert not isinstance(caught.value, TopologyError)
    assert all(name in str(caught.value) for name in ("one", "other", "group 0"))
    with pytest.raises(IncompatibleEnginesError):
        Route(other, one)


def test_attention_and_latent_layers_never_pair():
    latent = ModelSpec((LatentGroup((0,), latent_dim=8, dtype="float16"),))
    with pytest.raises(IncompatibleEnginesError, match="attention against latent"):
        Route(make_engine("one"), make_engine("other", latent))


def test_windows_of_equal_size_pair():
    model = attention_model(sliding_window=64)
    Route(make_engine("one", model), make_engine("other", model))


def test_missing_layers_are_refused_unless_allowed():
    three, two = attention_model(layers=3), attention_model(layers=2)
    for source, target, words in (
        (three, two, "layer 2 .*one.* missing in .*other"),
        (two, three, "layer 2 .*other.* missing in .*one"),
    ):
        engines = make_engine("one", source), make_engine("other", target)
        with pytest.raises(IncompatibleEnginesError, match=f"{words}.*allow_missing_layers"):
            Route(*engines)
        route = Route(*engines, allow_missing_layers=True)
        plan = route.plan(0, [[1]], [[2]], tokens=(0, 4))
        assert plan.num_bytes == 2 * 4 * 32
        (*_, last) = read = counting_tensors(engines[0])
        written = untouched_tensors(engines[1])
        before = [tensor.copy() for tensor in written]
        plan.copy(KVCache(engines[0], 0, read), KVCache(engines[1], 0, written))
        for layer in range(2):
            before[layer][2] = read[layer][1]
        for tensor, expected in zip(written, before, strict=True):
            np.testing.assert_array_equal(tensor, expected)
        assert last is read[-1]


def test_engines_with_no_layer_in_common_have_empty_plans():
    one = make_engine("one", ModelSpec((AttentionGroup((0,), **SPLIT),)))
    other = make_engine("other", ModelSpec((AttentionGroup((1,), **SPLIT),)))
    route = Route(one, other, allow_missing_layers=True)
    assert route.readers(0) == ()
    plan = route.plan(0, [[1]], [[2]], tokens=(0, 4))
    assert (plan.pairs, plan.notify_only, plan.num_bytes) == ((), (), 0)


def test_layers_are_matched_by_index_across_groups():
    model = ModelSpec((AttentionGroup(range(4), **SPLIT),))
    source = make_engine("source", model.regroup([[1, 3], [2], [0]]))
    target = make_engine("target", model.regroup([[0, 3], [1, 2]]))
    source_ids, target_ids = [[1], [2], [3]], [[4], [5]]
    plan = Route(source, target).plan(0, source_ids, target_ids, tokens=(0, 4))
    read, written = counting_tensors(source), untouched_tensors(target)
    plan.copy(KVCache(source, 0, read), KVCache(target, 0, written))
    # Source tensors hold layers 1 3 2 0, target tensors layers 0 3 1 2.
    for place, origin in enumerate([3, 1, 0, 2]):
        source_block = source_ids[[0, 0, 1, 2][origin]][0]
        target_block = target_ids[[0, 0, 1, 1][place]][0]
        np.testing.assert_array_equal(written[place][target_block], read[origin][source_block])
    groups = [(g.source_group, g.target_group, g.num_layers) for g in plan.explain().groups]
    assert groups == [(0, 0, 1), (2, 0, 1), (0, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("wrong", [None, 5, "engine", attention_model()], ids=label)
def test_a_route_is_between_engines(wrong):
    for ends in ((wrong, make_engine()), (make_engine(), wrong)):
        with pytest.raises(TypeError, match="EngineSpec"):
            Route(*ends)


def test_a_route_shows_and_keeps_its_ends():
    source, target = make_engine("source"), make_engine("target")
    route = Route(source, target)
    assert route.source is source and route.target is target
    assert repr(route) == "Route(source='source', target='target')"


def test_an_engine_may_be_paired_with_itself():
    engine = make_engine(tp_size=2)
    route = Route(engine, engine)
    assert [route.readers(rank) for rank in range(2)] == [(0,), (1,)]


@pytest.mark.parametrize("rank", [None, -1, 4, 1.0, "0", 2**63, 2**200, float("nan")], ids=label)
def test_ranks_are_checked(rank):
    engine = make_engine(model=attention_model(heads=4), tp_size=4)
    route = Route(engine, engine)
    with pytest.raises(ValueError, match="rank"):
        route.readers(rank)
    with pytest.raises(ValueError, match="rank"):
        route.plan(rank, [[1]], [[2]], tokens=(0, 4))


@pytest.mark.parametrize(
    ("heads", "source_tp", "target_tp", "reads"),
    [
        # `reads[t]` are the source ranks that target rank t reads.
        (2, 4, 4, [(0,), (1,), (2,), (3,)]),  # 2 holders, 2 readers of each head
        (2, 4, 8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),  # 2 holders, 4 readers
        (2, 8, 4, [(0,), (2,), (4,), (6,)]),  # 4 holders, 2 readers
        (1, 4, 3, [(0,), (1,), (2,)]),  # 4 holders, 3 readers: 0*4//3, 1*4//3, 2*4//3
        (1, 3, 4, [(0,), (0,), (1,), (2,)]),  # 3 holders, 4 readers: j*3//4
        (4, 2, 8, [(0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,)]),
        (4, 1, 1, [(0,)]),
    ],
)
def test_readers_of_replicas_are_spread_over_their_holders(heads, source_tp, target_tp, reads):
    model = attention_model(heads=heads)
    source = make_engine("source", model, tp_size=source_tp)
    target = make_engine("target", model, tp_size=target_tp)
    route = Route(source, target)
    for rank, expected in enumerate(reads):
        plan = route.plan(rank, [[1]], [[2]], tokens=(0, 4))
        assert plan.source_ranks == expected
        assert plan.target_ranks == (rank,)
        holders = [read for read in range(source_tp) if rank in route.readers(read)]
        assert plan.notify_only == tuple(read for read in holders if read not in expected)


def test_overlapping_head_ranges_are_read_unit_by_unit():
    model = attention_model(heads=4)
    source = make_engine("source", model, tp_size=2, head_ranges=((0, 3), (1, 4)))
    target = make_engine("target", model, tp_size=1)
    route = Route(source, target)
    plan = route.plan(0, [[1]], [[2]], tokens=(0, 4))
    # Heads 0 to 2 come from the first of their holders, head 3 from its only one.
    assert plan.pairs == ((0, 0), (1, 0))
    explained = {pair.source_rank: pair.num_bytes for pair in plan.explain().pairs}
    assert explained == {0: 3 * 4 * 16, 1: 1 * 4 * 16}
    backwards = Route(target, source)
    assert backwards.readers(0) == (0, 1)
    assert [backwards.plan(rank, [[1]], [[2]], tokens=(0, 4)).num_bytes for rank in range(2)] == [
        192,
        192,
    ]


def test_head_ranges_in_descending_order():
    model = attention_model(heads=4)
    source = make_engine("source", model, 4, "BNHC", tp_size=2, head_ranges=((2, 4), (0, 2)))
    target = make_engine("target", model, 4, "BNHC", tp_size=2)
    route = Route(source, target)
    assert [route.readers(rank) for rank in range(2)] == [(1,), (0,)]
    reads = [counting_tensors(source, rank, start=1 + 700 * rank)[0] for rank in range(2)]
    for rank in range(2):
        (written,) = untouched_tensors(target, rank)
        plan = route.plan(rank, [[1]], [[2]], tokens=(0, 4))
        assert plan.pairs == ((1 - rank, rank),)
        plan.copy(KVCache(source, 1 - rank, [reads[1 - rank]]), KVCache(target, rank, [written]))
        np.testing.assert_array_equal(written[2], reads[1 - rank][1])


def test_specs_that_are_equal_are_one_engine():
    one, twin = make_engine("source"), make_engine("source")
    target = make_engine("target")
    plan = Route(one, target).plan(0, [[1]], [[2]], tokens=(0, 4))
    plan.copy(
        KVCache(twin, 0, counting_tensors(twin)), KVCache(target, 0, untouched_tensors(target))
    )


def test_many_ranks_pair_quickly():
    model = ModelSpec((AttentionGroup((0,), num_kv_heads=8, head_dim=4),))
    big = EngineSpec("big", model, 4, "BNHC", tp_size=2**14)
    route = Route(big, big)
    assert route.readers(0) == tuple(range(2**11))
    assert route.plan(5, [[1]], [[2]], tokens=(0, 4)).pairs == ((5, 5),)
