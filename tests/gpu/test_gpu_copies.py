"""Blocks, rows and repairs on a GPU: what models by hand say, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_models import repair_by_hand
from elsewhere import Twins
from gpus import BY_ENDS, GPU, back, numbers, on, on_gpu, some_ids
from relayouts import Relayout

from kvferry import copy
from kvferry.errors import BlockRangeError, OverlapError

pytestmark = on_gpu

# [blocks, tokens, heads, dim] of 2-byte items: a few bytes, odd ones, a usual head, a large page.
SHAPES = [(9, 4, 3, 1), (30, 16, 3, 33), (600, 16, 8, 128), (12, 64, 16, 576)]
OF_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)
REPAIRS = {
    "kv_postprocess_blksize_on_receive": (2,),
    "kv_postprocess_layout_on_receive": (),
    "kv_postprocess_blksize_and_layout_on_receive": (2,),
}


@BY_ENDS
@OF_SHAPES
def test_blocks_are_copied_between_layouts(ends, shape):
    case = Relayout(ends, shape)
    case.copy(None)
    torch.cuda.synchronize()
    assert case.is_copied()
    assert np.array_equal(back(case.from_), case.source)


@BY_ENDS
@OF_SHAPES
def test_rows_are_copied_by_name(ends, shape):
    sources = [numbers(shape, seed) for seed in (1, 2)]
    targets = [numbers(shape, seed) for seed in (3, 4)]
    from_, to = ({str(i): on(place, a) for i, a in enumerate(arrays)}
                 for place, arrays in zip(ends, (sources, targets), strict=True))  # fmt: skip
    ids = some_ids(shape[0], 3), some_ids(shape[0], 4)
    copy.copy_kv_blocks(from_, to, *ids, "d2h")
    for (name, tensor), source, target in zip(to.items(), sources, targets, strict=True):
        target[ids[1]] = source[ids[0]]
        assert np.array_equal(back(tensor), target), name


def test_ids_may_lie_on_the_device():
    source, target = numbers((40, 64)), numbers((40, 64), seed=2)
    from_, to = on(GPU, source), on(GPU, target)
    ids = some_ids(40, 3), some_ids(40, 4)
    on_device = [torch.from_numpy(i).cuda() for i in ids]
    copy.copy_kv_blocks({"a": from_}, {"a": to}, *on_device, "h2d")
    target[ids[1]] = source[ids[0]]
    assert np.array_equal(back(to), target)


@pytest.mark.parametrize("offset", [1, 2, 3, 8])
def test_addresses_may_be_multiples_of_nothing(offset):
    source, target = (numbers((50, 4100), seed).view(np.uint8)[:, :4099] for seed in (1, 2))
    read, written = source[:, offset : offset + 4080], target[:, 8 - offset : 8 - offset + 4080]
    from_, to = Twins([read], GPU), Twins([written], GPU)
    ids, expected = (some_ids(50, 3), some_ids(50, 4)), target.copy()
    copy.copy_kv_blocks({"a": from_.tensors[0]}, {"a": to.tensors[0]}, *ids, "h2d")
    expected[ids[1], 8 - offset : 8 - offset + 4080] = read[ids[0]]
    torch.cuda.synchronize()
    to.fetch()
    assert np.array_equal(target, expected)


def judge_repair(name, shape):
    cache, rows = numbers(shape), some_ids(shape[0], 3)
    tensor = on(GPU, cache)
    repair_by_hand(name, cache, rows, *REPAIRS[name])
    getattr(copy, name)(tensor, rows, *REPAIRS[name])
    assert np.array_equal(back(tensor), cache)


@OF_SHAPES
@pytest.mark.parametrize("name", REPAIRS)
def test_rows_are_repaired(name, shape):
    judge_repair(name, shape)


def test_both_planes_of_rows_are_repaired():
    judge_repair("kv_postprocess_layout_on_receive", (30, 2, 16, 8, 128))


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_rows_larger_than_shared_memory_are_repaired(tokens):
    """Items of two bytes, which cannot be cut: 128 KiB, which some devices share, and 512 KiB."""
    judge_repair("kv_postprocess_layout_on_receive", (5, tokens, 8, 1))


@pytest.mark.parametrize(
    ("target_ids", "error"), [([5, 5], OverlapError), ([5, 6], BlockRangeError)]
)
def test_checks_come_before_anything_is_enqueued(target_ids, error):
    tensors = [on(GPU, numbers((6, 64), seed)) for seed in (1, 2)]
    with pytest.raises(error):
        copy.copy_kv_blocks({"a": tensors[0]}, {"a": tensors[1]}, [0, 1], target_ids, "h2d")
    assert np.array_equal(back(tensors[1]), numbers((6, 64), 2))
