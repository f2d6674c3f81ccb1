"""Every pair of TP sizes up to 16, and every rank, against the contract's text and `Route`."""

from __future__ import annotations

from itertools import product

import pytest

from kvferry import AttentionGroup, EngineSpec, ModelSpec, Route
from kvferry.errors import TopologyError
from kvferry.topology import EngineTransferInfo, TransferTopology

SIZES = range(1, 17)
HEADS = range(1, 17)
PAIRS = list(product(SIZES, SIZES))
DIVIDING = [
    (local, remote) for local, remote in PAIRS if local % remote == 0 or remote % local == 0
]
# Heads that an engine shares out without a remainder, or replicates as often each: both mean that
# its ranks hold what their place in the ratio says.
ROUTES = [
    (local, remote, heads)
    for local, remote in DIVIDING
    for heads in HEADS
    if all(heads % size == 0 or size % heads == 0 for size in (local, remote))
]


def topology_of(tp_rank: int, tp_size: int, *, heads: int = 8, is_mla: bool = False):
    return TransferTopology(tp_rank, tp_size, 16, "local", is_mla, False, heads, [])


def held_heads(heads: int, tp_size: int, tp_rank: int) -> set[int]:
    """Heads of a rank as the contract words it: a share each, or one replica."""
    if tp_size <= heads:
        return set(range(tp_rank * heads // tp_size, (tp_rank + 1) * heads // tp_size))
    return {tp_rank * heads // tp_size}


@pytest.mark.parametrize(("local", "remote"), PAIRS)
def test_ratio_and_target_ranks_of_every_rank(local, remote):
    divides = (local, remote) in DIVIDING
    for rank in range(local):
        topology = topology_of(rank, local)
        info = topology.register_remote_engine("remote", EngineTransferInfo(remote, 1024, 16, 1))
        if not divides:
            for call in (
                lambda topology=topology: topology.tp_ratio(remote),
                lambda topology=topology: topology.handshake_target_ranks(remote),
                lambda topology=topology: topology.target_remote_ranks("remote"),
                lambda topology=topology: topology.describe("remote"),
            ):
                with pytest.raises(TopologyError, match=rf"{local}\b.*\b{remote}\b"):
                    call()
            continue
        ratio = topology.tp_ratio(info.remote_tp_size)
        if local >= remote:
            assert ratio == local // remote > 0
            expected = [rank // ratio]
        else:
            assert ratio == -(remote // local) < 0
            expected = [rank * -ratio + i for i in range(-ratio)]
        assert topology.handshake_target_ranks(remote) == expected
        assert topology.target_remote_ranks("remote") == expected


@pytest.mark.parametrize(("local", "remote"), DIVIDING)
def test_target_ranks_are_those_that_name_each_other(local, remote):
    """Each side's list is the other's relation, read backwards, and nobody is left out."""
    there = {
        (rank, other)
        for rank in range(local)
        for other in topology_of(rank, local).handshake_target_ranks(remote)
    }
    back = {
        (rank, other)
        for other in range(remote)
        for rank in topology_of(other, remote).handshake_target_ranks(local)
    }
    assert there == back
    assert {rank for rank, _ in there} == set(range(local))
    assert {other for _, other in there} == set(range(remote))


@pytest.mark.parametrize("heads", range(17))
def test_heads_and_replicas_of_every_size(heads):
    for tp_size in SIZES:
        for rank in range(tp_size):
            topology = topology_of(rank, tp_size, heads=heads)
            assert topology.local_physical_heads == max(1, heads // tp_size)
            if heads % tp_size == 0 and heads:
                assert topology.local_physical_heads == len(held_heads(heads, tp_size, rank))
        if heads:
            held = [held_heads(heads, tp_size, rank) for rank in range(tp_size)]
            is_replicated = sum(map(len, held)) > len(set.union(*held))
        else:
            is_replicated = True
        assert topology_of(0, tp_size, heads=heads).local_replicates_kv_cache is is_replicated
        for is_mla in (False, True):
            topology = topology_of(0, 1, heads=heads, is_mla=is_mla)
            topology.register_remote_engine("remote", EngineTransferInfo(tp_size, 1024, 16, 1))
            assert topology.is_kv_replicated("remote") is is_replicated
            assert topology.replicates_kv_cache("remote") is (is_mla or is_replicated)


def test_block_size_ratios():
    for local, remote in product(range(1, 65), range(1, 65)):
        topology = TransferTopology(0, 1, local, "local", False, False, 1, [])
        if local % remote:
            with pytest.raises(TopologyError, match=rf"{local} is not divisible .* {remote}$"):
                topology.block_size_ratio(remote)
        else:
            assert topology.block_size_ratio(remote) * remote == local


@pytest.fixture(scope="module")
def engines():
    """Make each engine once: sixteen sizes of sixteen models."""

    def make(tp_size: int, heads: int) -> EngineSpec:
        model = ModelSpec((AttentionGroup((0,), num_kv_heads=heads, head_dim=4),))
        return EngineSpec(f"tp{tp_size}", model, 4, "BNHC", tp_size=tp_size)

    return {(size, heads): make(size, heads) for size in SIZES for heads in HEADS}


def test_a_route_reads_from_target_ranks_only(engines):
    exact = 0
    for local, remote, heads in ROUTES:
        route = Route(engines[remote, heads], engines[local, heads])
        for rank in range(local):
            targets = topology_of(rank, local, heads=heads).handshake_target_ranks(remote)
            read = set(route.plan(rank, [[0]], [[1]], tokens=(0, 4)).source_ranks)
            assert read
            assert read <= set(targets)
            own = held_heads(heads, local, rank)
            assert all(own & held_heads(heads, remote, target) for target in targets)
            if remote <= heads or local >= remote:
                # No replicas among them: each holds heads that no other does.
                assert read == set(targets)
                exact += 1
            else:
                # One of each head's replicas is enough.
                assert len(read) == len(own)
    assert exact
