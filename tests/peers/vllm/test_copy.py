"""Copies and repairs of blocks: vLLM's own functions beside kvferry's, on torch tensors."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector import utils as theirs

from kvferry.integrations import vllm as ours

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
NUM_BLOCKS = 7


def filled(*shape, dtype, seed):
    """Return a dense tensor of arbitrary bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


ids = st.lists(st.integers(0, 1 << 40), max_size=9)


@given(ids, ids)
def test_indices_are_the_same_tensors(source_ids, target_ids):
    asked = source_ids, target_ids, "cpu", torch.device("cpu")
    expected, found = (module._make_src_and_dst_indices(*asked) for module in (theirs, ours))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [(t.dtype, t.device) for t in found] == [(t.dtype, t.device) for t in expected]


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from([(1, 4), (2, 6), (3, 8)]),
    st.sampled_from([1, 2]),
    st.permutations(range(NUM_BLOCKS)),
    st.integers(0, NUM_BLOCKS),
    st.integers(0, 9),
)
def test_received_blocks_are_repaired_alike(dtype, order, sizes, ratio, blocks, count, seed):
    """A cache is (blocks, heads, tokens, dim) to vLLM, and (blocks, tokens, heads, dim) here."""
    heads, tokens = sizes
    memory = (heads, tokens) if order == "HND" else (tokens, heads)
    for name in (
        "kv_postprocess_blksize_on_receive",
        "kv_postprocess_blksize_and_layout_on_receive",
    ):
        received = filled(NUM_BLOCKS, *memory, 3, dtype=dtype, seed=seed)
        expected, found = received.clone(), received.clone()
        indices = torch.tensor(blocks[:count], dtype=torch.int64)
        by_heads = expected if order == "HND" else expected.transpose(1, 2)
        # Elements are only moved, and torch has no `index_copy_` of every type.
        getattr(theirs, name)(
            by_heads.view(torch.int8 if dtype.itemsize == 1 else dtype), indices, ratio
        )
        by_tokens = found if order == "NHD" else found.transpose(1, 2)
        getattr(ours, name)(by_tokens, indices, ratio)
        assert torch.equal(bytes_of(found), bytes_of(expected))


@cache
def gpu_platform():
    """Return vLLM's platform of NVIDIA's GPUs: the CPU's cannot copy blocks, this one indexes."""
    kernels = "vllm._C_stable_libtorch"  # loaded with the module, not called by these copies
    sys.modules.setdefault(kernels, ModuleType(kernels))
    return import_module("vllm.platforms.cuda").CudaPlatformBase


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["h2d", "d2h"]),
    st.permutations(range(NUM_BLOCKS)),
    st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS),
    st.integers(0, 2),
)
def test_blocks_are_copied_alike(dtype, direction, targets, sources, surplus):
    """Unequal lists, and empty ones, copy nothing in either."""
    layers = ["model.layers.0.attn", "model.layers.1.attn"]
    shape = NUM_BLOCKS, 2, 4, 3
    source = {name: filled(*shape, dtype=dtype, seed=seed) for seed, name in enumerate(layers)}
    targets = targets[: len(sources) + surplus]
    copied = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "current_platform", gpu_platform())
        for module in (theirs, ours):
            target = {name: filled(*shape, dtype=dtype, seed=9) for name in layers}
            module.copy_kv_blocks(source, target, sources, targets, direction)
            copied.append({name: bytes_of(tensor) for name, tensor in target.items()})
    for name in layers:
        assert torch.equal(copied[1][name], copied[0][name])
