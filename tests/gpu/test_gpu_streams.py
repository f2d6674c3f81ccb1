"""Streams: what a call leaves for them to do, in which order, and what a graph repeats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpus import GPU, PINNED, back, numbers, on, on_gpu

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, copy

pytestmark = on_gpu

SHAPE = (400, 16, 8, 128)
LAYOUTS = {"source_layout": "BNHC", "target_layout": "BHNC"}
IDS = list(range(399, 0, -1)), list(range(1, 400))
# Some tenths of a second, which no call takes to enqueue its work.
LONG_CYCLES = 500_000_000


def expected(source):
    return source[IDS[0]].transpose(0, 2, 1, 3)


def blocks(place=GPU, seed=1):
    """Return a source, and a target of zeros in head-major order, both blocks by block."""
    blocks, tokens, heads, dim = SHAPE
    source = numbers(SHAPE, seed)
    return source, on(place, source), on(GPU, np.zeros((blocks, heads, tokens, dim), np.uint16))


@pytest.mark.parametrize("place", [GPU, PINNED], ids=str)
def test_a_call_returns_while_its_stream_is_busy(place):
    source, from_, to = blocks(place)
    copy.copy_blocks(from_, to, *IDS, **LAYOUTS)  # kernels are loaded by the first call
    to.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
    copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
    assert not stream.query(), "the call waited for its stream"
    stream.synchronize()
    assert np.array_equal(to.cpu().numpy().view(np.uint16)[IDS[1]], expected(source))


def test_work_before_and_after_on_the_stream_is_ordered():
    source, from_, to = blocks()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        from_.add_(1)
        copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
        after = to + 1
    stream.synchronize()
    assert np.array_equal(back(after)[IDS[1]], expected(source) + 2)


def test_two_streams_copy_beside_one_another():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [blocks(seed=seed) for seed in range(8)]
    for index, (_, from_, to) in enumerate(cases):
        stream = streams[index % 2]
        copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
    for stream in streams:
        stream.synchronize()
    for source, _, to in cases:
        assert np.array_equal(to.cpu().numpy().view(np.uint16)[IDS[1]], expected(source))


def test_a_graph_repeats_a_copy():
    source, from_, to = blocks()
    stream = torch.cuda.Stream()
    copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
    for _ in range(3):
        to.zero_()
        from_.add_(1)
        source += 1
        torch.cuda.synchronize()
        graph.replay()
        assert np.array_equal(back(to)[IDS[1]], expected(source))


def test_a_graph_repeats_a_plan():
    model = ModelSpec((AttentionGroup(range(8), num_kv_heads=8, head_dim=128),))
    ends = EngineSpec("source", model, 16, "KBNHD"), EngineSpec("target", model, 32, "KBHND")
    tensors = [
        [on(GPU, numbers(slot.shape(12), seed)) for seed, slot in enumerate(engine.tensor_slots(0))]
        for engine in ends
    ]
    source, target = (KVCache(e, 0, own) for e, own in zip(ends, tensors, strict=True))
    plan = Route(*ends).plan(0, [[3, 8, 1, 5]], [[9, 2]], tokens=(3, 60))
    stream = torch.cuda.Stream()
    plan.copy(source, target, stream=stream.cuda_stream)
    stream.synchronize()
    direct = [back(tensor) for tensor in tensors[1]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan.copy(source, target, stream=stream.cuda_stream)
    blank = [numbers(tensor.shape, seed) for seed, tensor in enumerate(tensors[1])]
    for tensor, content in zip(tensors[1], blank, strict=True):
        tensor.copy_(torch.from_numpy(content.view(np.int16)))
    torch.cuda.synchronize()
    graph.replay()
    assert all(np.array_equal(back(t), d) for t, d in zip(tensors[1], direct, strict=True))


def test_a_graph_takes_nothing_that_is_not_resident():
    _, from_, to = blocks()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        with pytest.raises(ValueError, match="once before the capture"):
            copy.copy_blocks(from_, to, *IDS, **LAYOUTS, stream=stream.cuda_stream)
        to.zero_()
