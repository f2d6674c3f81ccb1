"""Rank arithmetic between two engines under the field's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
import pytest
import torch
from engines import label

from kvferry import errors, topology
from kvferry.errors import LayoutError, TopologyError
from kvferry.topology import BlockIds, EngineId, EngineTransferInfo, TransferTopology


def backend_of(*shape):
    """Make an attention backend whose cache of one block has this shape."""

    class Backend:
        asked = 0

        @classmethod
        def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size):
            assert (num_blocks, block_size, num_kv_heads, head_size) == (1, 16, 1, 1)
            cls.asked += 1
            return shape

    return Backend


# [planes, blocks, tokens, heads, head_dim], [blocks, planes, ...] and [blocks, tokens, latent].
PLANES_FIRST, BLOCKS_FIRST, LATENT = (
    backend_of(2, 1, 16, 1, 1),
    backend_of(1, 2, 16, 1, 1),
    backend_of(1, 16, 1),
)
WITH_BOTH = pytest.mark.parametrize("zeros", [np.zeros, torch.zeros], ids=["numpy", "torch"])
INFO = EngineTransferInfo(4, 1024, 16, 1)


class Untouchable:
    """A backend that a Mamba model must not ask."""

    def __getattr__(self, name):
        raise AssertionError(f"asked for {name}")


def make(**fields):
    """Make a topology of TP rank 1 of 2, unless said otherwise."""
    fields = {
        "tp_rank": 1,
        "tp_size": 2,
        "block_size": 64,
        "engine_id": "local",
        "is_mla": False,
        "is_mamba": False,
        "total_num_kv_heads": 8,
        "attn_backends": [PLANES_FIRST],
        **fields,
    }
    made = TransferTopology(**fields)
    made.register_remote_engine("remote", INFO)
    return made


class MambaSpec:
    """Stands for an engine's own class of that name."""


class DerivedSpec(MambaSpec):
    pass


class StateSpec:
    is_state = True


class AttentionSpec:
    is_state = False


def test_aliases():
    assert EngineId is str
    lists: BlockIds = ([1, 2], [3])
    assert lists


def test_errors_of_this_module_are_what_callers_catch():
    assert issubclass(TopologyError, errors.IncompatibleEnginesError | AssertionError)
    for kind in (errors.IncompatibleEnginesError, AssertionError, ValueError):
        with pytest.raises(kind, match="not divisible"):
            make().tp_ratio(3)


def test_transfer_info_is_a_frozen_record():
    info = EngineTransferInfo(
        remote_tp_size=4,
        remote_block_len=1024,
        remote_block_size=16,
        remote_physical_blocks_per_logical=1,
    )
    assert info == INFO
    assert isinstance(info, Hashable) and hash(info) == hash(INFO)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.remote_tp_size = 2


def test_fields_in_their_order():
    assert [field.name for field in dataclasses.fields(TransferTopology)] == [
        "tp_rank",
        "tp_size",
        "block_size",
        "engine_id",
        "is_mla",
        "is_mamba",
        "total_num_kv_heads",
        "attn_backends",
        "tensor_shape",
    ]
    made = TransferTopology(1, 2, 64, "local", False, False, 8, [PLANES_FIRST])
    assert made == make()
    assert made.tensor_shape is None
    assert topology.__all__ == ["BlockIds", "EngineId", "EngineTransferInfo", "TransferTopology"]


def test_the_first_registration_wins():
    made = make()
    other = EngineTransferInfo(8, 2048, 32, 2)
    assert made.register_remote_engine("remote", other) is INFO
    assert made.register_remote_engine("third", other) is other
    assert made.get_engine_info("remote") is INFO
    assert made.get_engine_info("third") is other
    assert made._engines == {"remote": INFO, "third": other}


def test_an_engine_is_not_its_own_remote():
    made = make()
    with pytest.raises(TopologyError, match="'local' is the local engine"):
        made.register_remote_engine("local", INFO)
    assert made._engines == {"remote": INFO}


def test_unknown_engines():
    made = make()
    for name in (
        "get_engine_info",
        "is_kv_replicated",
        "target_remote_ranks",
        "describe",
        "replicates_kv_cache",
    ):
        with pytest.raises(KeyError, match="unknown"):
            getattr(made, name)("unknown")


def test_ranks_and_ratios():
    made = make(tp_rank=5, tp_size=8)
    assert [made.tp_ratio(size) for size in (1, 2, 8, 16)] == [8, 4, 1, -2]
    assert [made.handshake_target_ranks(size) for size in (1, 2, 8, 16)] == [
        [0],
        [1],
        [5],
        [10, 11],
    ]
    assert made.target_remote_ranks("remote") == [2]
    assert made.block_size_ratio(16) == 4
    assert made.block_size_ratio(64) == 1


def test_heads():
    assert make().local_physical_heads == 4
    assert make(tp_size=16).local_physical_heads == 1
    assert make(total_num_kv_heads=5).local_physical_heads == 2
    assert make(total_num_kv_heads=0, is_mamba=True).local_physical_heads == 1


def test_replicas():
    assert not make().is_kv_replicated("remote")
    assert not make(total_num_kv_heads=4).is_kv_replicated("remote")
    assert make(total_num_kv_heads=3).is_kv_replicated("remote")
    assert make(total_num_kv_heads=3).replicates_kv_cache("remote")
    assert not make(is_mla=True).is_kv_replicated("remote")
    assert make(is_mla=True).replicates_kv_cache("remote")
    assert not make().local_replicates_kv_cache
    assert make(total_num_kv_heads=1).local_replicates_kv_cache
    assert make(is_mla=True).local_replicates_kv_cache


def test_sizes_may_be_numpy_integers():
    made = make(tp_rank=np.int32(5), tp_size=np.int64(8), block_size=np.uint16(64))
    assert made.tp_ratio(np.int64(2)) == 4
    assert made.block_size_ratio(np.int8(16)) == 4
    assert made.handshake_target_ranks(np.uint8(2)) == [1]
    assert make(total_num_kv_heads=np.int64(8)).local_physical_heads == 4


@pytest.mark.parametrize(("local", "remote"), [(4, 3), (3, 4), (6, 4), (4, 6), (16, 15)])
def test_sizes_that_do_not_divide_name_both(local, remote):
    made = make(tp_size=local)
    expected = f"TP size {local} and remote TP size {remote}: .* is not divisible by"
    for call in (made.tp_ratio, made.handshake_target_ranks):
        with pytest.raises(TopologyError, match=expected):
            call(remote)


@pytest.mark.parametrize("remote", [0, -1, -4, 2**14 + 1, 2**60], ids=label)
def test_remote_sizes_that_make_no_sense(remote):
    made = make()
    made.register_remote_engine("odd", EngineTransferInfo(remote, 1024, remote, 1))
    expected = f"TP size 2 and remote TP size {remote}"
    for call in (
        lambda: made.tp_ratio(remote),
        lambda: made.handshake_target_ranks(remote),
        lambda: made.target_remote_ranks("odd"),
        lambda: made.describe("odd"),
    ):
        with pytest.raises(TopologyError, match=expected):
            call()
    with pytest.raises(TopologyError, match=f"8 KV heads on TP size {remote}"):
        made.is_kv_replicated("odd")


@pytest.mark.parametrize("remote", [0, -1, -64, 24, 128, 2**60], ids=label)
def test_remote_block_sizes_that_make_no_sense(remote):
    with pytest.raises(TopologyError, match=f"block size 64 .*remote block size {remote}"):
        make().block_size_ratio(remote)


@pytest.mark.parametrize("remote", [None, "4", 4.0, 2**63, -(2**70), [4]], ids=label)
def test_what_is_no_size(remote):
    made = make()
    for call in (made.tp_ratio, made.handshake_target_ranks, made.block_size_ratio):
        with pytest.raises(TopologyError, match=r"remote_.*_size="):
            call(remote)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_rank": 2}, r"TP rank 2 is outside \[0, 2\)"),
        ({"tp_rank": -1}, r"TP rank -1 is outside \[0, 2\)"),
        ({"tp_rank": 0, "tp_size": 0}, "TP rank 0 of TP size 0"),
        ({"tp_rank": 0, "tp_size": -2}, "TP rank 0 of TP size -2"),
        ({"tp_size": 2**60}, f"TP rank 1 of TP size {2**60}"),
        ({"block_size": 0}, "block size 0 of TP rank 1"),
        ({"block_size": -16}, "block size -16 of TP rank 1"),
        ({"total_num_kv_heads": -1}, "-1 KV heads on TP size 2"),
        ({"tp_rank": "1"}, "tp_rank='1'"),
        ({"tp_size": 2.0}, r"tp_size=2\.0"),
        ({"block_size": None}, "block_size=None"),
        ({"total_num_kv_heads": 2**64}, f"total_num_kv_heads={2**64}"),
        ({"tensor_shape": 1}, "tensor_shape=1 is not a shape"),
    ],
)
def test_a_local_rank_that_makes_no_sense(fields, message):
    with pytest.raises(TopologyError, match=message):
        make(**fields)


def test_fields_that_are_set_later_are_checked_too():
    made = make()
    made.tp_rank = 2
    with pytest.raises(TopologyError, match=r"TP rank 2 is outside \[0, 2\)"):
        made.handshake_target_ranks(2)
    made.tp_size = 0
    with pytest.raises(TopologyError, match="TP size 0"):
        made.tp_ratio(2)
    with pytest.raises(TopologyError, match="TP size 0"):
        _ = made.local_physical_heads


def test_blocks_first():
    assert not make().is_kv_layout_blocks_first
    assert make(attn_backends=[BLOCKS_FIRST, PLANES_FIRST]).is_kv_layout_blocks_first
    # Leading 1, but no plane after it.
    assert not make(attn_backends=[LATENT]).is_kv_layout_blocks_first
    assert make(is_mamba=True).is_kv_layout_blocks_first


def test_shapes_may_be_any_sequence():
    assert make(attn_backends=[backend_of(*torch.Size((1, 2, 16, 1, 1)))]).is_kv_layout_blocks_first


@pytest.mark.parametrize("as_shape", [tuple, list, torch.Size])
def test_cross_layers(as_shape):
    assert not make().cross_layers_blocks
    assert make(tensor_shape=as_shape((80, 2, 10, 16, 8, 64))).cross_layers_blocks
    assert not make(tensor_shape=as_shape((2, 10, 16, 8, 64))).cross_layers_blocks
    assert not make(tensor_shape=as_shape((1, 80, 2, 10, 16, 8, 64))).cross_layers_blocks
    latent = {"attn_backends": [LATENT], "is_mla": True}
    assert make(tensor_shape=as_shape((10, 61, 16, 576)), **latent).cross_layers_blocks
    assert not make(
        tensor_shape=as_shape((80, 2, 10, 16, 8, 64)), is_mamba=True
    ).cross_layers_blocks


def test_split_keys_and_values():
    assert make().split_k_and_v
    assert make(tensor_shape=(2, 10, 16, 8, 64)).split_k_and_v
    assert not make(tensor_shape=(80, 2, 10, 16, 8, 64)).split_k_and_v
    assert not make(is_mla=True).split_k_and_v
    assert not make(attn_backends=[BLOCKS_FIRST]).split_k_and_v
    assert not make(is_mamba=True).split_k_and_v


def test_a_mamba_model_never_asks_a_backend():
    made = make(is_mamba=True, attn_backends=[Untouchable()], tensor_shape=(80, 2, 10, 16, 8, 64))
    assert made.is_kv_layout_blocks_first
    assert not made.cross_layers_blocks
    assert not made.split_k_and_v
    made.get_transfer_cache_regions(np.zeros((2, 3)), None)
    assert made.describe("remote") and repr(made)


def test_a_backend_is_asked_once_and_only_where_it_matters():
    backend = backend_of(2, 1, 16, 1, 1)
    made = make(attn_backends=[backend, Untouchable()], tensor_shape=(2, 10, 16, 8, 64))
    assert made.target_remote_ranks("remote") == [2, 3]
    assert backend.asked == 0
    assert (made.cross_layers_blocks, made.split_k_and_v) == (False, True)
    assert not made.is_kv_layout_blocks_first
    assert backend.asked == 1


def test_no_backend_to_ask():
    made = make(attn_backends=[])
    assert made.target_remote_ranks("remote") == [2, 3]
    with pytest.raises(TopologyError, match="attn_backends is empty"):
        _ = made.split_k_and_v


@WITH_BOTH
def test_keys_then_values_where_they_are_split(zeros):
    cache = zeros((2, 10, 16, 8, 64))
    regions = make().get_transfer_cache_regions(cache, AttentionSpec())
    assert regions is cache
    keys, values = regions
    assert keys.shape == values.shape == (10, 16, 8, 64)


@WITH_BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_backends": [BLOCKS_FIRST]},
        {"is_mla": True, "attn_backends": [LATENT]},
        {"tensor_shape": (80, 2, 10, 16, 8, 64)},
    ],
)
def test_one_region_else(zeros, fields):
    for cache in (zeros((10, 2, 16, 8, 64)), zeros((2, 10, 16))):
        (region,) = make(**fields).get_transfer_cache_regions(cache, object())
        assert region is cache


@WITH_BOTH
def test_a_mamba_model_has_blocks_first(zeros):
    made = make(is_mamba=True)
    cache = zeros((2, 10, 16, 8, 64))
    cache[1, 3] = 7
    (region,) = made.get_transfer_cache_regions(cache, AttentionSpec())
    assert region.shape == (10, 2, 16, 8, 64)
    assert (region[3, 1] == 7).all()
    cache[0, 5] = 8
    assert (region[5, 0] == 8).all(), "it is a view"
    already = zeros((10, 2, 16, 8, 64))
    (region,) = made.get_transfer_cache_regions(already, AttentionSpec())
    assert region is already


@WITH_BOTH
@pytest.mark.parametrize("spec", [MambaSpec(), DerivedSpec(), StateSpec()], ids=label)
@pytest.mark.parametrize("is_mamba", [False, True])
@pytest.mark.parametrize("as_pair", [tuple, list])
def test_the_first_tensor_of_a_state_layer(zeros, spec, is_mamba, as_pair):
    conv, ssm = zeros((2, 4, 3)), zeros((2, 8, 16))
    regions = make(is_mamba=is_mamba).get_transfer_cache_regions(as_pair((conv, ssm)), spec)
    assert isinstance(regions, list) and len(regions) == 1
    assert regions[0] is conv


@WITH_BOTH
def test_a_state_layer_without_its_pair(zeros):
    for wrong in (zeros((2, 4)), None, ()):
        with pytest.raises(LayoutError, match=r"cache of a state layer is a \w+"):
            make(is_mamba=True).get_transfer_cache_regions(wrong, MambaSpec())


def test_describe():
    assert make().describe("remote") == (
        "TransferTopology(tp_ratio=-2, num_kv_heads=8, local_tp=2, remote_tp=4, "
        "local_rank=1, remote_block_len=1024)"
    )
    latent = make(tp_rank=3, tp_size=8, is_mla=True).describe("remote")
    assert latent == (
        "TransferTopology(tp_ratio=2, num_kv_heads=1, local_tp=8, remote_tp=4, "
        "local_rank=3, remote_block_len=1024)"
    )
