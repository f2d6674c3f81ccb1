"""Blocks, rows and repairs on a GPU: what numpy says, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from elsewhere import Twins
from gpus import DEVICE, ENDS, GPU, PINNED, back, numbers, on, on_gpu

from kvferry import copy
from kvferry.errors import BlockRangeError, LayoutError, OverlapError

pytestmark = on_gpu

BY_NAME = pytest.mark.parametrize("ends", ENDS, ids=str)
# [blocks, tokens, heads, dim] of 2-byte items: a few bytes, odd ones, a usual head, a large page.
SHAPES = [(9, 4, 3, 1), (30, 16, 3, 33), (600, 16, 8, 128), (12, 64, 16, 576)]
OF_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)
REPAIRS = {
    "kv_postprocess_blksize_on_receive": (2,),
    "kv_postprocess_layout_on_receive": (),
    "kv_postprocess_blksize_and_layout_on_receive": (2,),
}


def some_ids(count, seed):
    """Return two thirds of the ids, in any order."""
    return np.random.default_rng(seed).permutation(count)[: 2 * count // 3]


@BY_NAME
@OF_SHAPES
def test_blocks_are_copied_between_layouts(ends, shape):
    blocks, tokens, heads, dim = shape
    source, target = numbers(shape), numbers((blocks, heads, tokens, dim), seed=2)
    from_, to = on(ends[0], source), on(ends[1], target)
    ids = some_ids(blocks, 3), some_ids(blocks, 4)
    copy.copy_blocks(from_, to, *ids, source_layout="BNHC", target_layout="BHNC")
    target[ids[1]] = source[ids[0]].transpose(0, 2, 1, 3)
    assert np.array_equal(back(to), target)
    assert np.array_equal(back(from_), source)


@BY_NAME
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
    on_device = [torch.from_numpy(i).to(DEVICE) for i in ids]
    copy.copy_kv_blocks({"a": from_}, {"a": to}, *on_device, "h2d")
    target[ids[1]] = source[ids[0]]
    assert np.array_equal(back(to), target)


@pytest.mark.parametrize("offset", [1, 2, 3, 8])
def test_addresses_may_be_multiples_of_nothing(offset):
    source, target = (np.random.default_rng(seed).bytes(50 * 4099) for seed in (1, 2))
    source, target = (
        np.frombuffer(bytearray(content), np.uint8).reshape(50, 4099)
        for content in (source, target)
    )
    read, written = source[:, offset : offset + 4080], target[:, 8 - offset : 8 - offset + 4080]
    from_, to = Twins([read], GPU), Twins([written], GPU)
    ids, expected = (some_ids(50, 3), some_ids(50, 4)), target.copy()
    copy.copy_kv_blocks({"a": from_.tensors[0]}, {"a": to.tensors[0]}, *ids, "h2d")
    expected[ids[1], 8 - offset : 8 - offset + 4080] = read[ids[0]]
    torch.cuda.synchronize()
    to.fetch()
    assert np.array_equal(target, expected)


@OF_SHAPES
@pytest.mark.parametrize("name", REPAIRS)
def test_repairs_are_those_of_host_memory(name, shape):
    cache = numbers(shape)
    tensor, rows = on(GPU, cache), some_ids(shape[0], 3)
    getattr(copy, name)(cache, rows, *REPAIRS[name])
    getattr(copy, name)(tensor, rows, *REPAIRS[name])
    assert np.array_equal(back(tensor), cache)


def test_rows_larger_than_shared_memory_are_repaired():
    cache = numbers((5, 8192, 8, 1))  # 64 Ki items of two bytes: no cut fits
    tensor = on(GPU, cache)
    copy.kv_postprocess_layout_on_receive(cache, [4, 1])
    copy.kv_postprocess_layout_on_receive(tensor, [4, 1])
    assert np.array_equal(back(tensor), cache)


@pytest.mark.parametrize(
    ("target_ids", "error"), [([5, 5], OverlapError), ([5, 6], BlockRangeError)]
)
def test_checks_come_before_anything_is_enqueued(target_ids, error):
    tensors = [on(GPU, numbers((6, 64), seed)) for seed in (1, 2)]
    with pytest.raises(error):
        copy.copy_kv_blocks({"a": tensors[0]}, {"a": tensors[1]}, [0, 1], target_ids, "h2d")
    assert np.array_equal(back(tensors[1]), numbers((6, 64), 2))


def test_host_memory_has_to_be_pinned():
    host, to = numbers((6, 64)), on(GPU, numbers((6, 64), 2))
    with pytest.raises(LayoutError, match="not pinned"):
        copy.copy_kv_blocks({"a": host}, {"a": to}, [0], [1], "h2d")
    assert np.array_equal(back(to), numbers((6, 64), 2))


def test_pinned_memory_alone_is_the_hosts():
    source, to = on(PINNED, numbers((6, 64))), on(PINNED, numbers((6, 64), 2))
    copy.copy_kv_blocks({"a": source}, {"a": to}, [0], [1], "h2d")
    assert np.array_equal(to.numpy()[1], source.numpy()[0])  # nothing was waited for
