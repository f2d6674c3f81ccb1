"""Graphs: what a captured stream repeats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpus import ENDS, GPU, back, numbers, on, on_gpu
from relayouts import Relayout

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route

pytestmark = on_gpu


def test_a_graph_repeats_a_copy():
    case = Relayout()
    stream = torch.cuda.Stream()
    case.copy(stream.cuda_stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case.copy(stream.cuda_stream)
    for _ in range(3):
        case.to.zero_()
        case.from_.add_(1)
        case.source += 1
        graph.replay()
        torch.cuda.synchronize()
        assert case.is_copied()


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


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_a_graph_takes_a_call_that_was_never_made(ends):
    """Its tables are uploaded whenever it runs, from memory that outlives later calls."""
    case = Relayout(ends, seed=11)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case.copy(stream.cuda_stream)
    torch.cuda.synchronize()
    assert not back(case.to).any()
    another = Relayout(ends, seed=12)
    another.copy(stream.cuda_stream)
    for _ in range(2):
        case.to.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert case.is_copied()
