"""Tensors that share memory: bytes decide, not ids, and no byte is written twice or also read."""

from __future__ import annotations

import numpy as np
import pytest
from engines import (
    attention_model,
    counting_tensors,
    make_engine,
    source_cache,
    untouched_tensors,
)

from kvferry import AttentionGroup, KVCache, ModelSpec, Route
from kvferry.errors import OverlapError


def two_groups(name, **fields):
    group = {"num_kv_heads": 2, "head_dim": 4, "dtype": "float16"}
    return make_engine(
        name, ModelSpec((AttentionGroup((0,), **group), AttentionGroup((1,), **group))), **fields
    )


def test_groups_may_share_one_allocation():
    """Hybrid engines hand one pool to several groups, which take different blocks of it."""
    source, target = two_groups("source"), two_groups("target")
    pool = untouched_tensors(target)[0]
    read = counting_tensors(source)
    route = Route(source, target)
    ends = KVCache(source, 0, read), KVCache(target, 0, [pool, pool])
    plan = route.plan(0, [[1, 2], [3]], [[4, 5], [6]], tokens=(0, 4))
    plan.copy(*ends)
    np.testing.assert_array_equal(pool[4], read[0][1])
    np.testing.assert_array_equal(pool[6], read[1][3])
    before = pool.copy()
    clash = route.plan(0, [[1], [3]], [[6], [6]], tokens=(0, 4))
    for run in (clash.copy, clash.descriptors):
        with pytest.raises(
            OverlapError, match=r"written through target tensor .*layers\.[01]"
        ) as caught:
            run(*ends)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(OverlapError):
        clash.descriptors(ends[0].describe(), ends[1].describe())
    np.testing.assert_array_equal(pool, before)


def test_one_id_in_two_groups_is_fine_where_their_tokens_differ():
    """Two groups in one memory: each is due other slots of the block that both name."""
    source, target = two_groups("source"), two_groups("target")
    pool = np.full((10, 4, 2, 8), 0xEEEE, np.uint16)
    read = counting_tensors(source)
    caches = KVCache(source, 0, read), KVCache(target, 0, [pool, pool])
    # Tokens 2 and 3 of the first group; of the second, which begins at token 4, tokens 4 and 5.
    plan = Route(source, target).plan(
        0, [[1, 2], [3, 4]], [[6, 7], [6]], tokens=(2, 6), target_first_token=(0, 4)
    )
    plan.copy(*caches)
    np.testing.assert_array_equal(pool[6, 2:], read[0][1, 2:])
    np.testing.assert_array_equal(pool[6, :2], read[1][4, :2])
    assert plan.descriptors(*caches).total_bytes == plan.num_bytes
    # With a token more, both would write slot 2.
    clash = Route(source, target).plan(
        0, [[1, 2], [3, 4]], [[6, 7], [6]], tokens=(2, 7), target_first_token=(0, 4)
    )
    with pytest.raises(OverlapError):
        clash.copy(*caches)


def test_bytes_that_two_sources_write_are_seen_from_either():
    """The second group's view lies one head further, so that heads of two sources meet."""
    model = two_groups("source").model
    source = make_engine("source", model, tp_size=2)
    target = make_engine("target", model)
    flat = np.full(10 * 4 * 2 * 8 + 8, 0xEEEE, np.uint16)
    views = [flat[shift : shift + 640].reshape(10, 4, 2, 8) for shift in (0, 8)]
    sources = [source_cache(source, rank) for rank in range(2)]
    written = KVCache(target, 0, views)
    # Each source writes one head of each view; the first view's second is the other's first.
    plan = Route(source, target).plan(0, [[1], [1]], [[6], [6]], tokens=(0, 4))
    with pytest.raises(OverlapError):
        plan.copy(sources, written)
    for cache in sources:
        with pytest.raises(OverlapError):
            plan.descriptors(cache, written)
    assert (flat == 0xEEEE).all()


def test_one_id_in_two_groups_is_fine_where_their_bytes_differ():
    """One allocation of [block, layer, token, head, content], each group a view of one layer."""
    source, target = two_groups("source"), two_groups("target")
    pool = np.full((10, 2, 4, 2, 8), 0xEEEE, np.uint16)
    read = counting_tensors(source)
    plan = Route(source, target).plan(0, [[1], [3]], [[6], [6]], tokens=(0, 4))
    caches = KVCache(source, 0, read), KVCache(target, 0, [pool[:, 0], pool[:, 1]])
    plan.copy(*caches)
    np.testing.assert_array_equal(pool[6, 0], read[0][1])
    np.testing.assert_array_equal(pool[6, 1], read[1][3])
    assert (pool[[0, 1, 2, 3, 4, 5, 7, 8, 9]] == 0xEEEE).all()
    assert plan.descriptors(*caches).total_bytes == plan.num_bytes


def test_slots_that_interleave_head_by_head():
    """Two layers whose heads alternate in one allocation: blocks overlap as spans, bytes do not."""
    model = attention_model(layers=2)
    source, target = make_engine("source", model), make_engine("target", model)
    pool = np.full((10, 4, 2, 2, 8), 0xEEEE, np.uint16)  # [block, token, head, layer, content]
    read = counting_tensors(source)
    views = [pool[:, :, :, layer] for layer in range(2)]
    Route(source, target).plan(0, [[1, 2]], [[6, 7]], tokens=(0, 8)).copy(
        KVCache(source, 0, read), KVCache(target, 0, views)
    )
    for layer in range(2):
        np.testing.assert_array_equal(pool[6:8, :, :, layer], read[layer][1:3])
    # One view shifted by a single item is a real clash.
    flat = pool.reshape(-1)
    shifted = np.lib.stride_tricks.as_strided(flat[1:], (9, 4, 2, 8), views[0].strides)
    with pytest.raises(OverlapError):
        Route(source, target).plan(0, [[1]], [[6]], tokens=(0, 4)).copy(
            KVCache(source, 0, read), KVCache(target, 0, [views[0], shifted])
        )


def test_blocks_move_inside_one_engine():
    engine = make_engine("engine")
    (memory,) = counting_tensors(engine)
    before = memory.copy()
    cache = KVCache(engine, 0, [memory])
    route = Route(engine, engine)
    route.plan(0, [[1, 2]], [[5, 7]], tokens=(0, 8)).copy(cache, cache)
    expected = before.copy()
    expected[[5, 7]] = before[[1, 2]]
    np.testing.assert_array_equal(memory, expected)
    for source_ids, target_ids in (
        ([1], [1]),
        ([1, 2], [2, 1]),
        ([1, 2], [2, 3]),
        ([3, 4], [2, 3]),
    ):
        clash = route.plan(0, [source_ids], [target_ids], tokens=(0, 4 * len(source_ids)))
        for run in (clash.copy, clash.descriptors):
            with pytest.raises(OverlapError, match=r"read.* written|written.* read") as caught:
                run(cache, cache)
        assert "layers.0" in str(caught.value)
        np.testing.assert_array_equal(memory, expected)


def test_parts_of_a_block_may_move_to_another_part():
    """The due tokens of a block are what counts, not the whole block."""
    engine = make_engine("engine")
    other = make_engine("other")
    (memory,) = counting_tensors(engine)
    before = memory.copy()
    # The other engine's view begins half a block later, so that slots 2 and 3 of its block 1 are
    # slots 0 and 1 of block 2 here, which are not read.
    shifted = memory.reshape(-1)[32:][: 9 * 64].reshape(9, 4, 2, 8)
    plan = Route(engine, other).plan(0, [[1]], [[1]], tokens=(2, 4))
    plan.copy(KVCache(engine, 0, [memory]), KVCache(other, 0, [shifted]))
    expected = before.copy()
    expected[2, 0:2] = before[1, 2:4]
    np.testing.assert_array_equal(memory, expected)
    with pytest.raises(OverlapError):
        Route(engine, other).plan(0, [[1]], [[1]], tokens=(0, 4)).copy(
            KVCache(engine, 0, [memory]), KVCache(other, 0, [shifted])
        )


def test_two_source_ranks_may_share_memory_and_two_targets_may_not():
    model = attention_model(heads=2)
    wide, one = make_engine("wide", model, 4, tp_size=2), make_engine("one", model)
    (replica,) = counting_tensors(wide)
    sources = [KVCache(wide, rank, [replica]) for rank in range(2)]
    (written,) = untouched_tensors(one)
    Route(wide, one).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(sources, KVCache(one, 0, [written]))
    np.testing.assert_array_equal(written[2, :, 0], replica[1, :, 0])
    np.testing.assert_array_equal(written[2, :, 1], replica[1, :, 0])
    same = attention_model(layers=2)
    source, target = make_engine("source", same), make_engine("target", same)
    (pool, _), before = untouched_tensors(target), untouched_tensors(target)[0]
    with pytest.raises(OverlapError, match="written"):
        Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(
            source_cache(source), KVCache(target, 0, [pool, pool])
        )
    np.testing.assert_array_equal(pool, before)
