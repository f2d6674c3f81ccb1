"""Random plans on a GPU, and between it and pinned memory, judged byte by byte by the reference."""

from __future__ import annotations

import torch
from elsewhere import judge_copy, judge_staged
from gpus import ENDS, GPU, PINNED, Place, on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples

from kvferry.testing import Scenario
from kvferry.testing.strategies import scenarios

pytestmark = on_gpu


@settings(max_examples=examples(10))
@given(scenarios(), st.sampled_from(ENDS))
def test_plans_move_exactly_what_is_due(scenario: Scenario, ends: tuple[Place, Place]) -> None:
    stream = torch.cuda.Stream()
    judge_copy(scenario, ends, stream.cuda_stream, stream.synchronize)


@settings(max_examples=examples(10))
@given(scenarios(), st.sampled_from([GPU, PINNED]))
def test_what_was_staged_is_laid_out(scenario: Scenario, scratch: Place) -> None:
    stream = torch.cuda.Stream()
    judge_staged(scenario, (scratch, GPU), stream.cuda_stream, stream.synchronize)
