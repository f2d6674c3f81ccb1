"""Inputs that serving engines have stumbled over, each with its right value worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from engines import (
    attention_model,
    counting_tensors,
    is_untouched,
    make_engine,
    rows,
    tokens_of,
    untouched_tensors,
)

from kvferry import AttentionGroup, KVCache, ModelSpec, Route
from kvferry.copy import copy_blocks, copy_kv_blocks
from kvferry.errors import BlockRangeError, LayoutError, OverlapError
from kvferry.groups import slice_block_ids_per_group


@pytest.mark.parametrize(
    ("source_tokens", "target_tokens"), [(32, 16), (16, 32), (24, 16), (16, 24)]
)
def test_block_sizes_need_no_ratio(source_tokens, target_tokens):
    model = attention_model(layers=2)
    source = make_engine("source", model, source_tokens, "NHD")
    target = make_engine("target", model, target_tokens, "HND")
    # 96 tokens fill whole blocks of 16, 24 and 32.
    source_ids = [7, 2, 9, 4, 1, 5][: 96 // source_tokens]
    target_ids = [3, 8, 0, 6, 2, 9][: 96 // target_tokens]
    plan = Route(source, target).plan(0, [source_ids], [target_ids], tokens=(0, 90))
    # 2 layers, 2 planes, 90 tokens, 2 heads of 4 elements of 2 bytes
    assert plan.num_bytes == 2 * 2 * 90 * 2 * 4 * 2

    source_memory, target_memory = counting_tensors(source), untouched_tensors(target)
    plan.copy(KVCache(source, 0, source_memory), KVCache(target, 0, target_memory))
    for read, written in zip(source_memory, target_memory, strict=True):
        read, written = (
            tokens_of(read, "KBNHD", source_ids),
            tokens_of(written, "KBHND", target_ids),
        )
        np.testing.assert_array_equal(written[:, :90], read[:, :90])
        assert is_untouched(written[:, 90:])
    unused = [block for block in range(10) if block not in target_ids]
    assert all(is_untouched(memory[:, unused]) for memory in target_memory)


def test_pieces_are_cut_at_the_block_boundaries_of_both_sides():
    model = attention_model(heads=1)  # 8 elements of 2 bytes a token: 16 bytes
    source, target = make_engine("source", model, 24), make_engine("target", model, 16)
    plan = Route(source, target).plan(0, [[5, 2]], [[1, 7, 3]], tokens=(0, 48))
    caches = (
        KVCache(source, 0, counting_tensors(source)),
        KVCache(target, 0, untouched_tensors(target)),
    )
    # Source blocks take 384 bytes, target blocks 256; the cuts are at tokens 16, 24 and 32.
    assert rows(plan.descriptors(*caches)) == [
        (0, 5 * 384, 0, 1 * 256, 256),
        (0, 2 * 384 + 128, 0, 3 * 256, 256),
        (0, 5 * 384 + 256, 0, 7 * 256, 128),
        (0, 2 * 384, 0, 7 * 256 + 128, 128),
    ]


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "read_from"),
    [(1, 4, [0, 0, 0, 0]), (1, 8, [0] * 8), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1])],
)
def test_more_target_ranks_than_heads_read_replicas(source_tp, target_tp, read_from):
    model = attention_model(heads=2)
    source = make_engine("source", model, 4, "NHD", tp_size=source_tp)
    target = make_engine("target", model, 4, "NHD", tp_size=target_tp)
    route = Route(source, target)
    source_memory = [
        counting_tensors(source, rank, start=1 + 999 * rank) for rank in range(source_tp)
    ]
    sources = [KVCache(source, rank, memory) for rank, memory in enumerate(source_memory)]
    whole_model = np.concatenate([memory[0] for memory in source_memory], axis=3)
    for rank, source_rank in enumerate(read_from):
        plan = route.plan(rank, [[6, 1]], [[2, 3]], tokens=(0, 8))
        assert plan.pairs == ((source_rank, rank),)
        assert plan.num_bytes == 2 * 8 * 4 * 2  # planes, tokens, elements, bytes: one head
        (written,) = untouched_tensors(target, rank)
        plan.copy(sources, KVCache(target, rank, [written]))
        head = rank * 2 // target_tp
        expected = tokens_of(whole_model, "KBNHD", [6, 1])[:, :, head : head + 1]
        np.testing.assert_array_equal(tokens_of(written, "KBNHD", [2, 3]), expected)
    for source_rank in range(source_tp):
        readers = tuple(rank for rank, read in enumerate(read_from) if read == source_rank)
        assert route.readers(source_rank) == readers


def test_replicated_source_heads_are_read_once():
    model = attention_model(heads=2)
    source = make_engine("source", model, 4, "NHD", tp_size=4)
    target = make_engine("target", model, 4, "NHD")
    route = Route(source, target)
    plan = route.plan(0, [[6]], [[2]], tokens=(0, 4))
    assert plan.pairs == ((0, 0), (2, 0))
    assert plan.source_ranks == (0, 2)
    assert plan.target_ranks == (0,)
    assert plan.notify_only == (1, 3)
    assert [route.readers(rank) for rank in range(4)] == [(0,)] * 4
    memory = [counting_tensors(source, rank, start=1 + 999 * rank)[0] for rank in range(4)]
    (written,) = untouched_tensors(target)
    # Ranks 1 and 3 are not read, so their caches need not be there.
    plan.copy(
        [KVCache(source, rank, [memory[rank]]) for rank in (2, 0)], KVCache(target, 0, [written])
    )
    np.testing.assert_array_equal(written[:, 2, :, 0], memory[0][:, 6, :, 0])
    np.testing.assert_array_equal(written[:, 2, :, 1], memory[2][:, 6, :, 0])


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "moves"),
    [
        # (target rank, source rank, heads)
        (3, 2, [(0, 0, [0, 1]), (0, 1, [2]), (1, 1, [3]), (1, 2, [4, 5])]),
        (2, 3, [(0, 0, [0, 1]), (1, 0, [2]), (1, 1, [3]), (2, 1, [4, 5])]),
    ],
)
def test_six_heads_between_two_and_three_ranks(source_tp, target_tp, moves):
    model = attention_model(heads=6)
    source = make_engine("source", model, 4, "NHD", tp_size=source_tp)
    target = make_engine("target", model, 4, "HND", tp_size=target_tp)
    route = Route(source, target)
    source_memory = [
        counting_tensors(source, rank, start=1 + 999 * rank)[0] for rank in range(source_tp)
    ]
    whole_model = np.concatenate(source_memory, axis=3)
    sources = [KVCache(source, rank, [memory]) for rank, memory in enumerate(source_memory)]
    for rank in range(target_tp):
        plan = route.plan(rank, [[6]], [[2]], tokens=(0, 4))
        assert plan.pairs == tuple((read, write) for write, read, _ in moves if write == rank)
        assert plan.notify_only == ()
        (written,) = untouched_tensors(target, rank)
        target_cache = KVCache(target, rank, [written])
        for write, read, heads in moves:
            if write == rank:
                # planes, heads, tokens, elements, bytes
                due_bytes = 2 * len(heads) * 4 * 4 * 2
                assert plan.descriptors(sources[read], target_cache).total_bytes == due_bytes
        plan.copy(sources, target_cache)
        held = 6 // target_tp
        expected = whole_model[:, 6, :, rank * held : (rank + 1) * held]
        np.testing.assert_array_equal(written[:, 2].transpose(0, 2, 1, 3), expected)
    for read in range(source_tp):
        assert route.readers(read) == tuple(
            sorted({write for write, other, _ in moves if other == read})
        )


@pytest.mark.parametrize("surplus", [0, 1])
def test_lists_of_unequal_length_are_matched_by_token_position(surplus):
    model = attention_model(heads=1)  # 16 bytes a token, 1024 a block
    source, target = make_engine("source", model, 64), make_engine("target", model, 64)
    route = Route(source, target)
    source_ids = list(range(50, 50 - 33 - surplus, -1))
    held = 31 * 64
    plan = route.plan(0, [source_ids], [[4, 9]], tokens=(0, 2049), target_first_token=held)
    assert plan.num_bytes == (2049 - 31 * 64) * 16
    caches = (
        KVCache(source, 0, counting_tensors(source, blocks=60)),
        KVCache(target, 0, untouched_tensors(target)),
    )
    # Element 31 covers tokens 1984 to 2047, element 32 the one after.
    expected = [(0, 19 * 1024, 0, 4 * 1024, 1024), (0, 18 * 1024, 0, 9 * 1024, 16)]
    assert rows(plan.descriptors(*caches)) == expected
    trimmed = route.plan(
        0,
        [source_ids[31:]],
        [[4, 9]],
        tokens=(0, 2049),
        source_first_token=held,
        target_first_token=(held,),
    )
    assert rows(trimmed.descriptors(*caches)) == expected


def test_a_group_that_needs_no_block_gets_nothing():
    model = ModelSpec(
        (
            AttentionGroup((0,), num_kv_heads=1, head_dim=4, dtype="float16"),
            AttentionGroup((1,), num_kv_heads=1, head_dim=4, dtype="float16"),
        )
    )
    source, target = make_engine("source", model), make_engine("target", model)
    plan = Route(source, target).plan(
        0, [[1, 2], [3, 4]], [[], [5, 6]], tokens=(0, 8), target_first_token=(8, 0)
    )
    assert plan.pairs == ((0, 0),)
    assert plan.num_bytes == 8 * 16
    source_memory, target_memory = counting_tensors(source), untouched_tensors(target)
    source_cache, target_cache = (
        KVCache(source, 0, source_memory),
        KVCache(target, 0, target_memory),
    )
    # Blocks take 64 bytes; both lists ascend by one, so that it is one fragment.
    assert rows(plan.descriptors(source_cache, target_cache)) == [(1, 3 * 64, 1, 5 * 64, 128)]
    plan.copy(source_cache, target_cache)
    assert is_untouched(target_memory[0])
    np.testing.assert_array_equal(target_memory[1][[5, 6]], source_memory[1][[3, 4]])


@pytest.mark.parametrize(
    ("source_ids", "tokens", "first"),
    [([], (0, 0), 0), ([], (64, 64), 64), ([1, 2], (0, 8), 8), ([], (0, 8), 8)],
)
def test_a_full_prefix_hit_notifies_every_holder(source_ids, tokens, first):
    model = attention_model(heads=4)
    source = make_engine("source", model, 4, tp_size=4)
    target = make_engine("target", model, 4, tp_size=2)
    route = Route(source, target)
    for rank in range(2):
        plan = route.plan(rank, [source_ids], [[]], tokens=tokens, target_first_token=first)
        assert (plan.pairs, plan.source_ranks, plan.target_ranks) == ((), (), ())
        assert plan.num_bytes == 0
        assert plan.notify_only == (2 * rank, 2 * rank + 1)
        assert all(rank in route.readers(holder) for holder in plan.notify_only)
        plan.copy((), ())  # completes, with nothing to move and no cache to move it between
        assert plan.explain().num_bytes == 0


def test_a_layout_is_declared_never_guessed():
    model = attention_model(heads=2, dim=128)
    token_major = make_engine("source", model, 16, "BNHC")
    head_major = make_engine("target", model, 16, "BHNC")
    memory = np.arange(10 * 16 * 2 * 256, dtype=np.uint16).reshape(10, 16, 2, 256)
    source = KVCache(token_major, 0, [memory])
    with pytest.raises(LayoutError, match=r"size 16 along H .* expected 2"):
        KVCache(head_major, 0, [memory])
    # The order of the dimensions may be named, but then memory must be head-major all the same.
    with pytest.raises(LayoutError, match="memory order"):
        KVCache(head_major, 0, [memory], axes="BNHC")
    head_major_memory = np.zeros((10, 2, 16, 256), np.uint16)
    target = KVCache(head_major, 0, [head_major_memory.transpose(0, 2, 1, 3)], axes="BNHC")
    Route(token_major, head_major).plan(0, [[3]], [[5]], tokens=(0, 16)).copy(source, target)
    np.testing.assert_array_equal(head_major_memory[5], memory[3].transpose(1, 0, 2))


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_sizes_do_not_blur_the_declared_layout(swapped):
    model = attention_model(heads=16, dim=4)
    layouts = ("BHNC", "BNHC") if swapped else ("BNHC", "BHNC")
    source, target = (
        make_engine("source", model, 16, layouts[0]),
        make_engine("target", model, 16, layouts[1]),
    )
    # Both shapes are (10, 16, 16, 8); only the declaration says which 16 is which.
    (read,), (written,) = counting_tensors(source), untouched_tensors(target)
    plan = Route(source, target).plan(0, [[3]], [[5]], tokens=(0, 16))
    plan.copy(KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    np.testing.assert_array_equal(written[5], read[3].transpose(1, 0, 2))


def test_blocks_longer_than_their_stride_are_refused():
    engine = make_engine("source", attention_model(heads=1, dim=12), 16)  # 16 * 24 * 2 = 768 bytes
    memory = np.zeros(10 * 1024, np.uint8).view(np.uint16)

    def pages(stride_bytes):
        strides = (stride_bytes, 48, 48, 2)
        return np.lib.stride_tricks.as_strided(memory, (10, 16, 1, 24), strides)

    with pytest.raises(LayoutError, match=r"steps 64 bytes along B .* takes 768"):
        KVCache(engine, 0, [pages(64)])
    with pytest.raises(LayoutError, match=r"steps 766 bytes along B .* takes 768"):
        KVCache(engine, 0, [pages(766)])
    for accepted in (768, 1024):
        (slot,) = KVCache(engine, 0, [pages(accepted)]).describe().slots
        assert slot.strides[0] == accepted


def test_a_due_target_block_is_named_once():
    model = attention_model()
    source = make_engine("source", model)
    target = make_engine("target", model, null_block_id=0)
    route = Route(source, target)
    with pytest.raises(OverlapError, match="block id 5 of group 0"):
        route.plan(0, [[1, 2, 3]], [[5, 6, 5]], tokens=(0, 12))
    with pytest.raises(ValueError, match="block id 5"):
        route.plan(0, [[1, 2, 3]], [np.array([6, 5, 5])], tokens=(0, 12))
    # Not due: past the range, or held already in the part of the list before it.
    assert route.plan(0, [[1, 2, 3]], [[5, 6, 5]], tokens=(0, 8)).num_bytes == 2 * 4 * 32
    assert route.plan(0, [[1, 2, 3]], [[5, 6, 5]], tokens=(4, 12)).num_bytes == 2 * 4 * 32
    # The null block may fill many places, and a source block may be read for many.
    assert route.plan(0, [[1, 2, 3]], [[0, 6, 0]], tokens=(0, 12)).num_bytes == 4 * 32
    assert route.plan(0, [[1, 1, 1]], [[4, 5, 6]], tokens=(0, 12)).num_bytes == 3 * 4 * 32


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "blocks"),
    [
        ([9, 8, 7, 6], [9, 8, 7, 6], [(6, 6, 4)]),
        ([9, 8, 7, 6], [5, 4, 3, 2], [(6, 2, 4)]),
        ([2, 3, 4, 5], [6, 7, 8, 9], [(2, 6, 4)]),
        # Contiguous on either side, but the directions differ.
        ([2, 3, 4, 5], [9, 8, 7, 6], [(5, 6, 1), (4, 7, 1), (3, 8, 1), (2, 9, 1)]),
        # A gap on one side only.
        ([9, 8, 6, 5], [4, 3, 2, 1], [(5, 1, 2), (8, 3, 2)]),
        # Neighbours in memory that are far apart in the lists.
        ([9, 2, 8, 1], [7, 4, 6, 3], [(1, 3, 2), (8, 6, 2)]),
    ],
)
def test_contiguous_blocks_merge_in_any_order(source_ids, target_ids, blocks):
    source, target = make_engine("source"), make_engine("target")
    plan = Route(source, target).plan(0, [source_ids], [target_ids], tokens=(0, 16))
    caches = (
        KVCache(source, 0, counting_tensors(source)),
        KVCache(target, 0, untouched_tensors(target)),
    )
    block_bytes = 4 * 2 * 8 * 2
    assert rows(plan.descriptors(*caches)) == [
        (0, read * block_bytes, 0, write * block_bytes, count * block_bytes)
        for read, write, count in blocks
    ]
    assert plan.explain(*caches).num_fragments == len(blocks)


@pytest.mark.parametrize("layout", ["BNHC", "BNHD"])
def test_fragments_never_reach_into_the_next_tensor(layout):
    model = attention_model(layers=2)
    source, target = (
        make_engine("source", model, 4, layout),
        make_engine("target", model, 4, layout),
    )
    shape = source.tensor_slots(0)[0].shape(10)
    tensors = len(source.tensor_slots(0))  # one a layer, or key and value a layer
    # One allocation a side: each tensor begins where the one before it ends.
    read = np.arange(tensors * np.prod(shape), dtype=np.uint16).reshape(tensors, *shape)
    written = np.zeros_like(read)
    caches = (KVCache(source, 0, list(read)), KVCache(target, 0, list(written)))
    plan = Route(source, target).plan(0, [range(10)], [range(10)], tokens=(0, 40))
    descriptors = plan.descriptors(*caches)
    tensor_bytes = int(np.prod(shape)) * 2
    assert rows(descriptors) == [(i, 0, i, 0, tensor_bytes) for i in range(tensors)]
    assert descriptors.total_bytes == plan.num_bytes == tensors * tensor_bytes
    assert descriptors.min_bytes == descriptors.mean_bytes == tensor_bytes
    plan.copy(*caches)
    np.testing.assert_array_equal(written, read)


def test_each_group_is_sliced_by_its_own_tokens_per_block():
    held = {0: list(range(4)), 1: list(range(100, 164)), 2: list(range(200, 232))}
    sliced = slice_block_ids_per_group(held, [64, 4, 8], 0, 256, strict=True)
    assert [len(ids) for ids in sliced] == [4, 64, 32]
    assert sliced == list(held.values())


def test_a_range_that_the_ids_of_a_group_do_not_cover_is_refused_where_asked():
    assert slice_block_ids_per_group({0: [7, 9]}, [512], 0, 4096) == [[7, 9]]
    with pytest.raises(BlockRangeError, match=r"group 0 needs 8 .* held 2"):
        slice_block_ids_per_group({0: [7, 9]}, [512], 0, 4096, strict=True)


def test_too_few_ids_name_what_is_needed_and_held():
    model = attention_model()
    source, target = make_engine("source", model, 512), make_engine("target", model, 512)
    with pytest.raises(BlockRangeError, match=r"group 0 .*'?target'?.* needs 8 .* got 2"):
        Route(source, target).plan(0, [range(8)], [[0, 1]], tokens=(0, 4096))
    with pytest.raises(BlockRangeError, match=r"group 0 .*'?source'?.* needs 8 .* got 2"):
        Route(source, target).plan(0, [[0, 1]], [range(8)], tokens=(0, 4096))


def test_millions_of_small_pieces_are_told_to_be_staged():
    """Half the heads of a deep model, token-major on both sides: 1 KiB pieces, one a token."""
    model = ModelSpec((AttentionGroup(range(80), num_kv_heads=8, head_dim=128),))
    source = make_engine("source", model, 16, "KBNHD", num_blocks=2048)
    target = make_engine("target", model, 16, "KBNHD", tp_size=2, num_blocks=2048)
    # Evens, then odds: no two blocks of the list are neighbours.
    ids = [*range(0, 2048, 2), *range(1, 2048, 2)]
    explained = Route(source, target).plan(1, [ids], [ids[::-1]], tokens=(0, 32768)).explain()
    (pair,) = explained.pairs
    assert pair.num_fragments == 80 * 2 * 32768
    assert (pair.min_bytes, pair.max_bytes) == (1024, 1024)
    # All blocks of a tensor are due, so that each tensor is one run with twice the bytes, but for
    # the other heads of its very first token.
    assert (pair.staged_descriptors, pair.staged_bytes) == (80, 2 * pair.num_bytes - 80 * 1024)
    assert pair.staging_pays
    assert "staged: 10 GiB in 80 descriptors, which pays on a wire" in str(explained)
    # Where all heads move, whole blocks are long enough by themselves.
    alike = make_engine("alike", model, 16, "KBNHD", num_blocks=2048)
    whole = Route(source, alike).plan(0, [ids], [ids[::-1]], tokens=(0, 32768)).explain()
    assert whole.pairs[0].min_bytes == 16 * 8 * 128 * 2
    assert not whole.pairs[0].staging_pays


def test_a_block_copy_names_each_target_block_once():
    """Neither the last writer wins nor any other: nothing is written."""
    source = [np.arange(10 * 4 * 16, dtype=np.uint16).reshape(10, 4, 2, 8) + i for i in range(2)]
    target = [np.full_like(layer, 0xEEEE) for layer in source]
    layouts = {"source_layout": "BNHC", "target_layout": "BNHC"}
    named = [dict(zip(("first", "last"), side, strict=True)) for side in (source, target)]
    for target_ids in ([5, 6, 5], np.array([6, 5, 5])):
        with pytest.raises(OverlapError, match=r"\b5\b"):
            copy_blocks(source, target, [1, 2, 3], target_ids, **layouts)
        for direction in ("h2d", "d2h"):
            with pytest.raises(OverlapError, match=r"\b5\b"):
                copy_kv_blocks(*named, [1, 2, 3], target_ids, direction)
    # The same bytes twice, though not the same tensor.
    with pytest.raises(OverlapError):
        copy_blocks(source, [target[0]] * 2, [1], [5], **layouts)
    with pytest.raises(OverlapError):
        copy_kv_blocks(named[0], dict.fromkeys(named[0], target[0]), [1], [5], "h2d")
    assert all(map(is_untouched, target))
    # A source block may be read for many.
    copy_blocks(source, target, [1, 1, 1], [4, 5, 6], **layouts)
    copy_kv_blocks(*named, [2, 2], [7, 8], "h2d")
    for read, written in zip(source, target, strict=True):
        np.testing.assert_array_equal(written[4:9], read[[1, 1, 1, 2, 2]])
