"""Random plans on a GPU, and between it and pinned memory, judged byte by byte by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from elsewhere import Place, Twins, judge_copy
from gpus import ENDS, GPU, PINNED, on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route
from kvferry.testing import Scenario, apply_staged_descriptors
from kvferry.testing.strategies import scenarios

pytestmark = on_gpu


@settings(max_examples=examples(10))
@given(scenarios(), st.sampled_from(ENDS))
def test_plans_move_exactly_what_is_due(scenario: Scenario, ends: tuple[Place, Place]) -> None:
    stream = torch.cuda.Stream()
    judge_copy(scenario, ends, stream.cuda_stream, stream.synchronize)


@pytest.mark.parametrize("place", [GPU, PINNED], ids=str)
def test_what_was_staged_is_laid_out(place):
    model = ModelSpec((AttentionGroup(range(4), num_kv_heads=4, head_dim=128),))
    source_engine = EngineSpec("source", model, 16, "KBNHD")
    target_engine = EngineSpec("target", model, 64, "KBHND", tp_size=2)
    plan = Route(source_engine, target_engine).plan(1, [[3, 0, 2, 7, 5]], [[1, 2]], tokens=(5, 80))
    rng = np.random.default_rng(1)
    sources, direct = (
        [rng.integers(0, 1 << 16, slot.shape(blocks), np.uint16) for slot in engine.tensor_slots(r)]
        for engine, r, blocks in ((source_engine, 0, 8), (target_engine, 1, 4))
    )
    staged_to = [tensor.copy() for tensor in direct]
    source = KVCache(source_engine, 0, sources)
    plan.copy(source, KVCache(target_engine, 1, direct))
    to = Twins(staged_to, GPU)
    cache = KVCache(target_engine, 1, to.tensors)
    staged = plan.staged(source, cache)
    scratch = np.zeros(staged.scratch_bytes, np.uint8)
    apply_staged_descriptors(staged.descriptors, sources, scratch)
    stream = torch.cuda.Stream()
    staged.finish(Twins([scratch], place).tensors[0], cache, stream=stream.cuda_stream)
    stream.synchronize()
    to.fetch()
    assert all(np.array_equal(one, two) for one, two in zip(direct, staged_to, strict=True))
