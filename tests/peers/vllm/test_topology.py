"""Rank arithmetic: vLLM's own topology beside kvferry's, for all small engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector import utils as theirs

from kvferry.integrations import vllm as ours

SIZES = [1, 2, 3, 4, 6, 8, 16, 32]


@st.composite
def topologies(draw):
    """Draw the same topology of both modules, each with one remote engine."""
    tp_size = draw(st.sampled_from(SIZES))
    fields = {
        "tp_rank": draw(st.integers(0, tp_size - 1)),
        "tp_size": tp_size,
        "block_size": draw(st.sampled_from([8, 16, 24, 128])),
        "engine_id": "local",
        "is_mla": draw(st.booleans()),
        "is_mamba": draw(st.booleans()),
        "total_num_kv_heads": draw(st.sampled_from([1, 2, 3, 8, 64])),
        "attn_backends": [],
    }
    remote = {
        "remote_tp_size": draw(st.sampled_from(SIZES)),
        "remote_block_len": draw(st.integers(1, 1 << 40)),
        "remote_block_size": draw(st.sampled_from([8, 16, 24, 128])),
        "remote_physical_blocks_per_logical": draw(st.integers(1, 8)),
    }
    pair = []
    for module in (theirs, ours):
        topology = module.TransferTopology(**fields)
        info = module.EngineTransferInfo(**remote)
        assert topology.register_remote_engine("remote", info) is info
        pair.append(topology)
    return pair, remote


def outcome(ask):
    """Return what a question gives, or that its answer is an assertion."""
    try:
        return ask()
    except AssertionError:
        return "refused"


@given(topologies())
def test_arithmetic_is_the_same(drawn):
    pair, remote = drawn
    tp_size, block_size = remote["remote_tp_size"], remote["remote_block_size"]
    for ask in (
        lambda topology: topology.local_physical_heads,
        lambda topology: topology.local_replicates_kv_cache,
        lambda topology: topology.tp_ratio(tp_size),
        lambda topology: topology.block_size_ratio(block_size),
        lambda topology: topology.is_kv_replicated("remote"),
        lambda topology: topology.replicates_kv_cache("remote"),
        lambda topology: topology.handshake_target_ranks(tp_size),
        lambda topology: topology.target_remote_ranks("remote"),
        lambda topology: topology.get_engine_info("remote").remote_block_len,
    ):
        expected, found = (outcome(lambda t=topology, ask=ask: ask(t)) for topology in pair)
        assert found == expected


@given(topologies(), topologies())
def test_engines_are_registered_alike(drawn, other):
    pair, _ = drawn
    for module, topology in zip((theirs, ours), pair, strict=True):
        first = topology.get_engine_info("remote")
        again = module.EngineTransferInfo(**other[1])
        assert topology.register_remote_engine("remote", again) is first
        assert len(topology._engines) == 1
        with pytest.raises(AssertionError):
            topology.register_remote_engine("local", again)
        with pytest.raises(KeyError):
            topology.get_engine_info("unknown")


@given(topologies())
def test_both_describe_themselves_with_the_same_figures(drawn):
    expected, found = (outcome(lambda t=t: t.describe("remote")) for t in drawn[0])
    if expected == "refused":
        assert found == "refused"
        return
    their_figures, our_figures = (
        dict(figure.split("=") for figure in said.partition("(")[2].rstrip(")").split(", "))
        for said in (expected, found)
    )
    assert len(our_figures) == 6
    assert our_figures.items() <= their_figures.items()
