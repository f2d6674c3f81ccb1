"""Sizes: more pieces, and larger tensors, than some number holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpus import BY_ENDS, GPU, PINNED, back, numbers, on, on_gpu

from kvferry import copy

pytestmark = on_gpu


@pytest.fixture(autouse=True)
def _room():
    """Give back what a test has taken, so that no two of them have it at once."""
    yield
    torch.cuda.empty_cache()


@BY_ENDS
@pytest.mark.parametrize(
    ("layers", "blocks", "items"), [(72, 1 << 14, 128), (1, (1 << 20) + (1 << 14), 32)]
)
def test_more_than_a_million_pieces_go_in_one_call(ends, layers, blocks, items):
    source = numbers((layers, blocks, items))
    from_, to = on(ends[0], source), on(ends[1], np.zeros_like(source))
    ids = [np.random.default_rng(seed).permutation(blocks) for seed in (3, 4)]
    caches = ({str(layer): own for layer, own in enumerate(end)} for end in (from_, to))
    stream = torch.cuda.Stream()
    copy.copy_kv_blocks(*caches, *ids, "h2d", stream=stream.cuda_stream)
    expected = np.empty_like(source)
    expected[:, ids[1]] = source[:, ids[0]]
    assert np.array_equal(back(to), expected)


@pytest.mark.parametrize("place", [GPU, PINNED], ids=str)
def test_planes_may_lie_more_than_4_gib_apart(place):
    large = torch.zeros((2, 9 << 14, 16, 8, 128), dtype=torch.int16, device="cuda")  # 9 GiB
    ids = [(9 << 14) - 1, 0, 1 << 17, 7]
    small = numbers((4, 2, 8, 16, 128))
    from_, to = on(place, small), on(place, np.zeros_like(small))
    layouts = "BKHND", "KBNHD"
    copy.copy_blocks(
        from_, large, range(4), ids, source_layout=layouts[0], target_layout=layouts[1]
    )
    torch.cuda.synchronize()
    for block, content in zip(ids, from_, strict=True):
        planes = large[:, block]  # [2, tokens, heads, dim]
        assert torch.equal(planes.transpose(1, 2).cpu(), content.cpu())
    copy.copy_blocks(
        large, to, ids, [2, 0, 3, 1], source_layout=layouts[1], target_layout=layouts[0]
    )
    assert np.array_equal(back(to)[[2, 0, 3, 1]], small)
    for block in ids:
        large[:, block] = 0
    assert not large.view(torch.int64).any(), "something else was written, too"


def test_a_run_may_be_longer_than_4_gib():
    source = torch.arange((9 << 29) // 8, device="cuda").view(1, -1)
    target = torch.zeros_like(source)
    copy.copy_kv_blocks({"a": source}, {"a": target}, [0], [0], "h2d")
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    assert source[0, -1] == source.numel() - 1
