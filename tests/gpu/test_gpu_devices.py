"""Two GPUs: peers, and streams of one that are handed to a call on the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from elsewhere import Twins, judge_copy
from gpus import GPU, PINNED, Place, numbers, on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples

from kvferry import copy
from kvferry.errors import LayoutError
from kvferry.testing import Scenario
from kvferry.testing.strategies import scenarios

HAS_TWO = torch.cuda.device_count() > 1
ARE_PEERS = HAS_TWO and all(torch.cuda.can_device_access_peer(*ends) for ends in ((0, 1), (1, 0)))
pytestmark = [*on_gpu, pytest.mark.skipif(not HAS_TWO, reason="there is only one GPU")]

OTHER = Place(1)
PEERS = [(GPU, OTHER), (OTHER, GPU)]


@pytest.mark.skipif(HAS_TWO and not ARE_PEERS, reason="the GPUs have no access to each other")
@settings(max_examples=examples(20))
@given(scenarios(), st.sampled_from(PEERS), st.sampled_from([0, 1]))
def test_plans_between_peers_move_exactly_what_is_due(
    scenario: Scenario, ends: tuple[Place, Place], ordinal: int
) -> None:
    stream = torch.cuda.Stream(ordinal)
    judge_copy(scenario, ends, stream.cuda_stream, stream.synchronize)


def copy_rows(ends, stream):
    """Copy some rows, and wait; what was to be read, and what there is where it went."""
    source = numbers((6, 64))
    target = np.zeros_like(source)
    from_, to = Twins([source], ends[0]), Twins([target], ends[1])
    names = ({"a": twins.tensors[0]} for twins in (from_, to))
    copy.copy_kv_blocks(*names, [5, 0], [1, 4], "h2d", stream=stream)
    torch.cuda.synchronize(1)
    to.fetch()
    return source, target


@pytest.mark.skipif(ARE_PEERS, reason="the GPUs have access to each other")
@pytest.mark.parametrize("ends", PEERS, ids=str)
def test_gpus_without_access_to_each_other_are_refused_by_name(ends):
    with pytest.raises(LayoutError, match="peer access") as refused:
        copy_rows(ends, None)
    assert all(f"cuda:{ordinal}" in str(refused.value) for ordinal in (0, 1))


@pytest.mark.parametrize("ends", [(OTHER, OTHER), (PINNED, OTHER), (OTHER, PINNED)], ids=str)
@pytest.mark.parametrize("is_default", [True, False])
def test_the_second_gpu_copies_while_the_first_is_current(ends, is_default):
    stream = torch.cuda.Stream(1)
    assert torch.cuda.current_device() == 0
    source, target = copy_rows(ends, None if is_default else stream.cuda_stream)
    assert torch.cuda.current_device() == 0
    assert np.array_equal(target[[1, 4]], source[[5, 0]])
    assert not target[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("ends", [(GPU, GPU), (PINNED, GPU), (GPU, PINNED)], ids=str)
def test_a_stream_of_a_gpu_that_takes_no_part_is_refused_by_name(ends):
    stream = torch.cuda.Stream(1)
    with pytest.raises(ValueError, match="the stream belongs to cuda:1") as refused:
        copy_rows(ends, stream.cuda_stream)
    assert "cuda:0" in str(refused.value)
