"""Tensor slots: which tensors a rank registers, in which order, of which shapes."""

from __future__ import annotations

import numpy as np
import pytest
from engines import attention_model, label, make_engine

from kvferry import AttentionGroup, EngineSpec, LatentGroup, ModelSpec, StateGroup, StatePart

BOTH, KEY, VALUE = ("K", "V"), ("K",), ("V",)


def described(engine, rank=0, blocks=100):
    return [(slot.layers, slot.planes, slot.shape(blocks)) for slot in engine.tensor_slots(rank)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Two layers, 2 heads of 8 elements, 16 tokens a block.
        ("NHD", [((0,), BOTH, (2, 100, 16, 2, 8)), ((1,), BOTH, (2, 100, 16, 2, 8))]),
        ("HND", [((0,), BOTH, (2, 100, 2, 16, 8)), ((1,), BOTH, (2, 100, 2, 16, 8))]),
        ("KBNHD", [((0,), BOTH, (2, 100, 16, 2, 8)), ((1,), BOTH, (2, 100, 16, 2, 8))]),
        ("KBHND", [((0,), BOTH, (2, 100, 2, 16, 8)), ((1,), BOTH, (2, 100, 2, 16, 8))]),
        ("BKNHD", [((0,), BOTH, (100, 2, 16, 2, 8)), ((1,), BOTH, (100, 2, 16, 2, 8))]),
        ("BHNC", [((0,), BOTH, (100, 2, 16, 16)), ((1,), BOTH, (100, 2, 16, 16))]),
        ("BNHC", [((0,), BOTH, (100, 16, 2, 16)), ((1,), BOTH, (100, 16, 2, 16))]),
        (
            "BNHD",
            [
                ((0,), KEY, (100, 16, 2, 8)),
                ((0,), VALUE, (100, 16, 2, 8)),
                ((1,), KEY, (100, 16, 2, 8)),
                ((1,), VALUE, (100, 16, 2, 8)),
            ],
        ),
        ("BLKNHD", [((0, 1), BOTH, (100, 2, 2, 16, 2, 8))]),
        ("LBHNC", [((0, 1), BOTH, (2, 100, 2, 16, 16))]),
        ("BKLNHD", [((0, 1), BOTH, (100, 2, 2, 16, 2, 8))]),
        ("LBNHD", [((0, 1), KEY, (2, 100, 16, 2, 8)), ((0, 1), VALUE, (2, 100, 16, 2, 8))]),
    ],
)
def test_slots_follow_the_layout(layout, expected):
    engine = make_engine("a", attention_model(layers=2, heads=2, dim=8), 16, layout)
    assert described(engine) == expected
    slots = engine.tensor_slots(0)
    assert len({slot.name for slot in slots}) == len(slots)
    assert {slot.group for slot in slots} == {0}
    assert {slot.item_bytes for slot in slots} == {2}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("BNHC", [(BOTH, (7, 4, 2, 20))]),
        ("BNHD", [(KEY, (7, 4, 2, 12)), (VALUE, (7, 4, 2, 8))]),
    ],
)
def test_values_may_be_narrower_than_keys(layout, expected):
    engine = make_engine("a", attention_model(dim=12, v_head_dim=8), 4, layout)
    assert [(planes, shape) for _, planes, shape in described(engine, blocks=7)] == expected


@pytest.mark.parametrize(
    ("heads", "tp_size", "held"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (6, 4, [1, 2, 1, 2]),
        (7, 3, [2, 2, 3]),
        (2, 4, [1, 1, 1, 1]),
        (3, 8, [1] * 8),
        (1, 3, [1, 1, 1]),
    ],
)
def test_ranks_hold_an_even_share_of_heads_or_a_replica(heads, tp_size, held):
    engine = make_engine("a", attention_model(heads=heads), 4, "NHD", tp_size=tp_size)
    assert [described(engine, rank)[0][2][3] for rank in range(tp_size)] == held


def test_head_ranges_are_given_once_or_a_group():
    model = ModelSpec(
        (
            AttentionGroup((0,), num_kv_heads=4, head_dim=8),
            LatentGroup((1,), latent_dim=32),
            AttentionGroup((2,), num_kv_heads=4, head_dim=8),
        )
    )
    uneven, overlapping = ((0, 3), (3, 4)), ((0, 3), (1, 4))

    def heads(head_ranges):
        engine = make_engine("a", model, 4, "BNHC", tp_size=2, head_ranges=head_ranges)
        return [
            [slot.shape(1)[2] for slot in engine.tensor_slots(rank) if slot.planes == BOTH]
            for rank in range(2)
        ]

    assert heads(None) == [[2, 2], [2, 2]]
    assert heads(uneven) == [[3, 3], [1, 1]]
    assert heads((uneven, None, overlapping)) == [[3, 3], [1, 3]]
    assert heads((None, None, uneven)) == [[2, 3], [2, 1]]


def test_one_split_for_a_single_rank_is_not_one_entry_a_group():
    model = attention_model(heads=4)
    for given in (((0, 4),), (((0, 4),),)):
        engine = make_engine("a", model, 4, "BNHC", head_ranges=given)
        assert engine.tensor_slots(0)[0].shape(1) == (1, 4, 4, 8)


def hybrid(**fields):
    conv = StatePart("conv", shape=(3, 64), dtype="bfloat16", shard_axis=1)
    whole = StatePart("whole", shape=(5,), dtype="int8")
    ssm = StatePart("ssm", shape=(8, 16, 6), dtype="float32", shard_axis=0, shard_units=4)
    model = ModelSpec(
        (
            StateGroup((4, 1), (conv, whole, ssm)),
            LatentGroup((3, 0), latent_dim=576, dtype="float8_e4m3fn"),
            AttentionGroup((2, 5), num_kv_heads=4, head_dim=8),
        )
    )
    return EngineSpec("a", model, **{"tokens_per_block": 16, "layout": "NHD", **fields})


def test_slots_come_in_group_order_with_layers_ascending():
    engine = hybrid()
    assert [(slot.group, slot.layers, slot.planes) for slot in engine.tensor_slots(0)] == [
        (0, (1,), ("conv",)),
        (0, (1,), ("whole",)),
        (0, (1,), ("ssm",)),
        (0, (4,), ("conv",)),
        (0, (4,), ("whole",)),
        (0, (4,), ("ssm",)),
        (1, (0,), ("latent",)),
        (1, (3,), ("latent",)),
        (2, (2,), BOTH),
        (2, (5,), BOTH),
    ]
    assert [slot.layout for slot in engine.tensor_slots(0)] == ["BS"] * 6 + ["BND"] * 2 + [
        "KBNHD"
    ] * 2
    names = [slot.name for slot in engine.tensor_slots(0)]
    assert len(set(names)) == len(names)


def test_latent_and_state_shapes_by_tensor_parallel_rank():
    # 64 columns, 4 units of 2 rows each; a unit is replicated where there are more ranks.
    for tp_size, columns, rows_held in ((1, 64, 8), (2, 32, 4), (4, 16, 2), (8, 8, 2)):
        for rank in range(tp_size):
            engine = hybrid(tp_size=tp_size)
            shapes = [slot.shape(9) for slot in engine.tensor_slots(rank)]
            assert shapes[:3] == [(9, 3, columns), (9, 5), (9, rows_held, 16, 6)]
            assert shapes[6] == (9, 16, 576)
            items = [slot.item_bytes for slot in engine.tensor_slots(rank)]
            assert items == [2, 1, 4, 2, 1, 4, 1, 1, 2, 2]


def test_uneven_state_units_are_split_like_heads():
    part = StatePart("conv", shape=(6, 2), dtype="int8", shard_axis=0)
    model = ModelSpec((StateGroup((0,), (part,)),))
    engine = EngineSpec("a", model, tokens_per_block=0, layout="BNHC", tp_size=4)
    assert [engine.tensor_slots(rank)[0].shape(1) for rank in range(4)] == [
        (1, 1, 2),
        (1, 2, 2),
        (1, 1, 2),
        (1, 2, 2),
    ]


def test_a_packed_state_counts_elements():
    part = StatePart("s", shape=(4, 6), dtype="float4_e2m1fn_x2")
    engine = EngineSpec("a", ModelSpec((StateGroup((0,), (part,)),)), 0, "BNHC")
    (slot,) = engine.tensor_slots(0)
    assert (slot.shape(2), slot.item_bytes) == ((2, 4, 3), 1)


def test_ranks_count_context_fastest_and_pipeline_slowest():
    model = attention_model(layers=4, heads=3)
    engine = make_engine("a", model, 4, "BNHC", tp_size=2, pp_size=2, cp_size=2)
    assert engine.num_ranks == 8
    for rank in range(8):
        stage, tensor_rank = rank // 4, rank // 2 % 2
        layers = [slot.layers for slot in engine.tensor_slots(rank)]
        assert layers == [(2 * stage,), (2 * stage + 1,)]
        assert engine.tensor_slots(rank)[0].shape(1) == (1, 2, 1 + tensor_rank, 8)


def test_stages_split_layer_indices_not_groups():
    model = ModelSpec((AttentionGroup((0, 5), 2, 8), LatentGroup((2, 3), 8)))
    engine = EngineSpec("a", model, 4, "NHD", pp_size=2)
    assert [[slot.layers for slot in engine.tensor_slots(rank)] for rank in range(2)] == [
        [(0,), (2,)],
        [(5,), (3,)],
    ]
    joined = EngineSpec("a", model, 4, "LBNHC", pp_size=2, pp_layers=((0, 1), (1, 6)))
    assert [[slot.layers for slot in joined.tensor_slots(rank)] for rank in range(2)] == [
        [(0,)],
        [(5,), (2,), (3,)],
    ]
    assert joined.tensor_slots(1)[0].shape(7) == (1, 7, 4, 2, 16)


@pytest.mark.parametrize(
    ("fields", "tokens_per_slot", "slots"),
    [
        ({}, 1, 64),
        ({"cp_size": 4}, 1, 16),
        ({"cp_size": 4, "cp_interleave": 8}, 1, 16),
        ({"physical_blocks_per_block": 4}, 1, 16),
        ({"physical_blocks_per_block": (8,)}, 1, 8),
        ({}, 4, 16),
        ({"cp_size": 2, "cp_interleave": 4}, 4, 8),
        ({"cp_size": 2, "physical_blocks_per_block": 2, "cp_interleave": 2}, 2, 8),
        ({"physical_blocks_per_block": 64}, 1, 1),
    ],
)
def test_slots_a_block(fields, tokens_per_slot, slots):
    engine = make_engine(
        "a", attention_model(tokens_per_slot=tokens_per_slot), 64, "BNHC", **fields
    )
    for rank in range(engine.num_ranks):
        assert engine.tensor_slots(rank)[0].shape(10) == (10, slots, 2, 8)


def test_per_group_values_differ():
    engine = hybrid(
        tokens_per_block=(0, 8, 32),
        layout=("BS", "LBND", "BKHND"),
        physical_blocks_per_block=(1, 2, 4),
        num_blocks=(3, None, 5),
    )
    shapes = [slot.shape(6) for slot in engine.tensor_slots(0)]
    assert shapes[6:] == [(2, 6, 4, 576), (6, 2, 4, 8, 8), (6, 2, 4, 8, 8)]
    assert [slot.layout for slot in engine.tensor_slots(0)][5:8] == ["BS", "LBND", "BKHND"]


def test_whole_numbers_of_any_kind_are_counts():
    engine = make_engine("a", attention_model(), np.int64(4), "BNHC", tp_size=np.int32(2))
    assert engine.tensor_slots(np.uint8(1))[0].shape(np.int64(3)) == (3, 4, 1, 8)


@pytest.mark.parametrize(
    "rank", [None, -1, 2, 1.0, "0", 2**63, 2**200, float("nan"), (0,)], ids=label
)
def test_ranks_are_checked(rank):
    with pytest.raises(ValueError, match="rank"):
        make_engine(tp_size=2).tensor_slots(rank)


@pytest.mark.parametrize("blocks", [-1, 2**64, 2**200, -(2**70)], ids=label)
def test_shapes_have_a_countable_number_of_blocks(blocks):
    with pytest.raises(ValueError, match="num_blocks"):
        make_engine().tensor_slots(0)[0].shape(blocks)


def test_slots_too_large_to_address_are_refused():
    with pytest.raises(ValueError, match=r"2\^63"):
        make_engine("a", attention_model(heads=2**31, dim=2**31), 2**31).tensor_slots(0)


def test_a_slot_shows_what_it_is():
    shown = repr(make_engine().tensor_slots(0)[0])
    assert all(word in shown for word in ("TensorSlot", "layers.0", "BNHC"))
