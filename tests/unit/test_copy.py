"""Running plans: which bytes move, which never do, and that a refused copy has changed nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import (
    attention_model,
    counting_tensors,
    label,
    make_engine,
    planes,
    source_cache,
    target_cache,
    untouched_tensors,
)

from kvferry import KVCache, Route
from kvferry.errors import BlockRangeError, LayoutError, OverlapError

SOURCE, TARGET = make_engine("source"), make_engine("target")
ROUTE = Route(SOURCE, TARGET)
LAYOUTS = ["KBNHD", "KBHND", "BKNHD", "BNHC", "BHNC"]


def simple_plan():
    return ROUTE.plan(0, [[3, 1]], [[2, 5]], tokens=(0, 8))


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_every_layout_becomes_every_other(source_layout, target_layout):
    model = attention_model(heads=3)
    source = make_engine("source", model, 4, source_layout)
    target = make_engine("target", model, 6, target_layout)
    (read,), (written,) = counting_tensors(source), untouched_tensors(target)
    before = read.copy()
    plan = Route(source, target).plan(0, [[3, 1, 8]], [[2, 5]], tokens=(1, 11))
    plan.copy(KVCache(source, 0, [read]), KVCache(target, 0, [written]))
    np.testing.assert_array_equal(read, before)
    expected = untouched_tensors(target)[0]
    for token in range(1, 11):
        source_place = ([3, 1, 8][token // 4], token % 4)
        target_place = ([2, 5][token // 6], token % 6)
        planes_view(expected, target_layout, target_place)[...] = planes(read, source_layout)[
            :, source_place[0], source_place[1]
        ]
    np.testing.assert_array_equal(written, expected)


class planes_view:  # noqa: N801, reads like an indexing function
    """Assigns [plane, head, dim] at one (block, token) of a tensor in any layout."""

    def __init__(self, tensor, layout, place):
        self.tensor, self.layout, self.place = tensor, layout, place

    def __setitem__(self, key, values):
        block, token = self.place
        if self.layout == "KBNHD":
            self.tensor[:, block, token] = values
        elif self.layout == "KBHND":
            self.tensor[:, block, :, token] = values
        elif self.layout == "BKNHD":
            self.tensor[block, :, token] = values
        elif self.layout == "BNHC":
            self.tensor[block, token] = np.concatenate(list(values), axis=-1)
        else:
            self.tensor[block, :, token] = np.concatenate(list(values), axis=-1)


@pytest.mark.parametrize("layout", ["BLKNHD", "LBHNC", "BKLNHD", "LBNHD"])
def test_tensors_of_all_layers_meet_tensors_of_one(layout):
    model = attention_model(layers=3)
    joined, single = (
        make_engine("source", model, 4, layout),
        make_engine("target", model, 4, "KBNHD"),
    )
    read, written = counting_tensors(joined), untouched_tensors(single)
    plan = Route(joined, single).plan(0, [[3, 1]], [[2, 5]], tokens=(0, 8))
    plan.copy(KVCache(joined, 0, read), KVCache(single, 0, written))
    axes = {"BLKNHD": "BLKNHD->LKBNHD", "BKLNHD": "BKLNHD->LKBNHD"}
    if layout in axes:
        by_layer = np.einsum(axes[layout], read[0])
    elif layout == "LBNHD":
        by_layer = np.stack(read, axis=1)
    else:
        content = read[0].transpose(0, 1, 3, 2, 4)  # [layer, block, token, head, content]
        by_layer = np.stack(np.split(content, 2, axis=-1), axis=1)
    for layer in range(3):
        np.testing.assert_array_equal(written[layer][:, [2, 5]], by_layer[layer][:, [3, 1]])
        assert (written[layer][:, [0, 1, 3, 4, 6, 7, 8, 9]] == 0xEEEE).all()
    # And back again.
    (again,) = returned = untouched_tensors(joined)[:1] if len(read) == 1 else [None]
    if again is not None:
        back = Route(single, joined).plan(0, [[2, 5]], [[3, 1]], tokens=(0, 8))
        back.copy(KVCache(single, 0, written), KVCache(joined, 0, returned))
        block_axis = layout.index("B")
        for block in (3, 1):
            np.testing.assert_array_equal(
                np.take(again, block, block_axis), np.take(read[0], block, block_axis)
            )


def test_keys_and_values_of_unequal_width():
    model = attention_model(dim=6, v_head_dim=2)
    source, target = (
        make_engine("source", model, 4, "BNHC"),
        make_engine("target", model, 4, "BHND"),
    )
    (read,), (keys, values) = counting_tensors(source), untouched_tensors(target)
    Route(source, target).plan(0, [[3]], [[5]], tokens=(0, 4)).copy(
        KVCache(source, 0, [read]), KVCache(target, 0, [keys, values])
    )
    np.testing.assert_array_equal(keys[5].transpose(1, 0, 2), read[3][..., :6])
    np.testing.assert_array_equal(values[5].transpose(1, 0, 2), read[3][..., 6:])


@pytest.mark.parametrize(
    "given", [lambda cache: cache, lambda cache: [cache], lambda cache: (cache,)]
)
def test_one_cache_or_several(given):
    (written,) = untouched_tensors(TARGET)
    simple_plan().copy(given(source_cache(SOURCE)), given(KVCache(TARGET, 0, [written])))
    np.testing.assert_array_equal(written[[2, 5]], counting_tensors(SOURCE)[0][[3, 1]])


@pytest.mark.parametrize(
    "wrong", [None, 5, "x", [None], [5], {0: 1}, object(), iter(())], ids=label
)
def test_copies_are_between_caches(wrong):
    plan = simple_plan()
    for ends in ((wrong, target_cache(TARGET)), (source_cache(SOURCE), wrong)):
        with pytest.raises(TypeError, match="KVCache"):
            plan.copy(*ends)


def test_caches_that_the_plan_does_not_use_are_ignored():
    model = attention_model(heads=4)
    source, target = (
        make_engine("source", model, tp_size=4),
        make_engine("target", model, tp_size=2),
    )
    plan = Route(source, target).plan(1, [[1]], [[2]], tokens=(0, 4))
    assert plan.pairs == ((2, 1), (3, 1))
    sources = [source_cache(source, rank) for rank in range(4)]
    targets = [target_cache(target, rank) for rank in range(2)]
    unused = targets[0].describe().slots
    plan.copy(sources, targets)
    plan.copy([*sources, sources[0]], [targets[0], *targets])  # a rank twice that is not used
    assert targets[0].describe().slots == unused


def test_a_rank_without_a_cache_is_named():
    model = attention_model(heads=4)
    source, target = (
        make_engine("source", model, tp_size=4),
        make_engine("target", model, tp_size=2),
    )
    plan = Route(source, target).plan(1, [[1]], [[2]], tokens=(0, 4))
    sources = [source_cache(source, rank) for rank in range(4)]
    written = untouched_tensors(target, 1)
    whole = KVCache(target, 1, written)
    with pytest.raises(ValueError, match=r"rank 3 of engine .*source"):
        plan.copy(sources[:3], whole)
    with pytest.raises(ValueError, match=r"rank 1 of engine .*target"):
        plan.copy(sources, target_cache(target, 0))
    with pytest.raises(ValueError, match=r"rank 2 of engine .*source"):
        plan.copy((), whole)
    with pytest.raises(ValueError, match="rank 2 twice"):
        plan.copy([*sources, sources[2]], whole)
    assert (written[0] == 0xEEEE).all()


def test_caches_of_other_engines_are_refused():
    plan = simple_plan()
    twin = make_engine("source", num_blocks=5)
    (written,) = untouched_tensors(TARGET)
    for sources in (source_cache(twin), source_cache(make_engine("other")), target_cache(TARGET)):
        with pytest.raises(ValueError, match="source"):
            plan.copy(sources, KVCache(TARGET, 0, [written]))
    with pytest.raises(ValueError, match="target"):
        plan.copy(source_cache(SOURCE), source_cache(SOURCE))
    assert (written == 0xEEEE).all()


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", float("nan"), 2**63, 2**200, [1]], ids=label)
def test_threads_are_checked(threads):
    with pytest.raises(ValueError, match="threads"):
        simple_plan().copy(source_cache(SOURCE), target_cache(TARGET), threads=threads)


def test_a_copy_that_is_refused_has_changed_nothing():
    """The fault lies in the last of three layers, so that a check that comes late is seen."""
    model = attention_model(layers=3)
    source, target = make_engine("source", model), make_engine("target", model)
    route = Route(source, target)
    read = counting_tensors(source)

    def refused(error, written, plan, sources=None):
        before = [tensor.copy() for tensor in written]
        for threads in (1, 4, None):
            with pytest.raises(error):
                plan.copy(
                    sources or KVCache(source, 0, read),
                    KVCache(target, 0, written),
                    threads=threads,
                )
        for tensor, unchanged in zip(written, before, strict=True):
            np.testing.assert_array_equal(tensor, unchanged)

    plan = route.plan(0, [[1, 9]], [[2, 9]], tokens=(0, 8))
    fresh = untouched_tensors(target)
    refused(BlockRangeError, [*fresh[:2], fresh[2][:9]], plan)
    short = KVCache(source, 0, [*read[:2], read[2][:9]])
    refused(BlockRangeError, untouched_tensors(target), plan, short)
    fixed = untouched_tensors(target)
    fixed[2].flags.writeable = False
    refused(LayoutError, fixed, plan)
    fresh = untouched_tensors(target)
    refused(OverlapError, [*fresh[:2], fresh[1]], plan)
    # The last target tensor is the first source tensor, and block 9 is read and written.
    refused(OverlapError, [*untouched_tensors(target)[:2], read[0]], plan)


def test_refusals_of_several_pairs_change_nothing():
    model = attention_model(heads=2)
    wide, one = make_engine("wide", model, tp_size=2), make_engine("one", model)
    sources = [
        source_cache(wide, 0),
        source_cache(wide, 1, blocks=1),
    ]  # the second one is too small
    (written,) = untouched_tensors(one)
    with pytest.raises(BlockRangeError, match=r"block id 1 .*wide"):
        Route(wide, one).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(
            sources, KVCache(one, 0, [written])
        )
    assert (written == 0xEEEE).all()


def test_torch_and_numpy_mix():
    (read,) = counting_tensors(SOURCE)
    written = torch.zeros(10, 4, 2, 8, dtype=torch.bfloat16)
    simple_plan().copy(KVCache(SOURCE, 0, [read]), KVCache(TARGET, 0, [written]))
    bits = written.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits[[2, 5]], read[[3, 1]])
    assert not bits[[0, 1, 3, 4, 6, 7, 8, 9]].any()


def test_a_plan_may_run_again_and_on_other_tensors():
    plan = simple_plan()
    for start in (1, 500):
        read, written = counting_tensors(SOURCE, start=start), untouched_tensors(TARGET)
        for _ in range(2):
            plan.copy(KVCache(SOURCE, 0, read), KVCache(TARGET, 0, written))
        np.testing.assert_array_equal(written[0][[2, 5]], read[0][[3, 1]])
