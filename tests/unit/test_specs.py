"""Specs: what they refuse, each time naming the field."""

from __future__ import annotations

import numpy as np
import pytest
from engines import attention_model, hybrid_model, label, make_engine

from kvferry import (
    AttentionGroup,
    EngineSpec,
    LatentGroup,
    ModelSpec,
    StateGroup,
    StatePart,
)
from kvferry.errors import LayoutError

DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float4_e2m1fn_x2": 1,
}
# Nothing that counts something is one of these.
NO_COUNTS = [
    None,
    0,
    -1,
    1.0,
    float("nan"),
    float("inf"),
    "1",
    b"1",
    [1],
    (1,),
    2**31 + 1,
    2**63,
    2**200,
]
NO_SIZES = [value for value in NO_COUNTS if value not in ([1], (1,))]


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim", "tokens_per_slot"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=label)
def test_attention_counts_are_checked(field, value):
    fields = {"layers": (0,), "num_kv_heads": 2, "head_dim": 4, field: value}
    with pytest.raises(ValueError, match=field):
        AttentionGroup(**fields)


@pytest.mark.parametrize("value", [value for value in NO_COUNTS if value is not None], ids=label)
def test_value_head_dim_is_checked(value):
    with pytest.raises(ValueError, match="v_head_dim"):
        AttentionGroup((0,), 2, 4, v_head_dim=value)


@pytest.mark.parametrize(
    "value", [None, 0, -2, 1.0, "4", float("nan"), 2**31 + 1, 2**200], ids=label
)
def test_sliding_window_is_checked(value):
    with pytest.raises(ValueError, match="sliding_window"):
        AttentionGroup((0,), 2, 4, sliding_window=value)


def test_sliding_window_is_a_multiple_of_the_tokens_per_slot():
    with pytest.raises(ValueError, match=r"sliding_window=6 .* tokens_per_slot=4"):
        AttentionGroup((0,), 2, 4, sliding_window=6, tokens_per_slot=4)
    AttentionGroup((0,), 2, 4, sliding_window=8, tokens_per_slot=4)
    AttentionGroup((0,), 2, 4, sliding_window=-1, tokens_per_slot=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda layers: AttentionGroup(layers, 2, 4),
        lambda layers: LatentGroup(layers, 4),
        lambda layers: StateGroup(layers, (StatePart("conv", (4,), "int8"),)),
    ],
    ids=["attention", "latent", "state"],
)
@pytest.mark.parametrize(
    "layers",
    [
        None,
        5,
        (),
        [],
        (0, 0),
        (-1,),
        (0, 1.0),
        ("0",),
        "01",
        (None,),
        ((0,),),
        (2**31 + 1,),
        (2**200,),
    ],
    ids=label,
)
def test_layers_are_checked(make, layers):
    with pytest.raises(ValueError, match="layers"):
        make(layers)


@pytest.mark.parametrize(
    "dtype", [None, 5, "", "bf16", "BFLOAT16", "float4", "torch.float16", np.float16]
)
def test_dtype_is_checked(dtype):
    for make in (
        lambda: AttentionGroup((0,), 2, 4, dtype=dtype),
        lambda: LatentGroup((0,), 4, dtype=dtype),
        lambda: StateGroup((0,), (StatePart("conv", (4,), dtype),)),
    ):
        with pytest.raises(ValueError, match="dtype"):
            make()


def test_every_dtype_is_known_with_its_size():
    for dtype, item_bytes in DTYPES.items():
        engine = make_engine(model=attention_model(dim=8, dtype=dtype))
        (slot,) = engine.tensor_slots(0)
        assert slot.item_bytes == item_bytes
        assert slot.shape(1)[-1] == (8 if dtype == "float4_e2m1fn_x2" else 16)


def test_packed_elements_come_in_pairs():
    with pytest.raises(ValueError, match=r"head_dim=5 .* 2 .*float4_e2m1fn_x2"):
        AttentionGroup((0,), 2, 5, dtype="float4_e2m1fn_x2")
    with pytest.raises(ValueError, match="v_head_dim=3"):
        AttentionGroup((0,), 2, 4, v_head_dim=3, dtype="float4_e2m1fn_x2")
    with pytest.raises(ValueError, match="latent_dim=7"):
        LatentGroup((0,), 7, dtype="float4_e2m1fn_x2")
    with pytest.raises(ValueError, match="conv"):
        StateGroup((0,), (StatePart("conv", (4, 3), "float4_e2m1fn_x2"),))


@pytest.mark.parametrize("field", ["latent_dim", "tokens_per_slot"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=label)
def test_latent_counts_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        LatentGroup(**{"layers": (0,), "latent_dim": 4, field: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": 5}, "name"),
        ({"shape": ()}, "shape"),
        ({"shape": 4}, "shape"),
        ({"shape": (0, 4)}, "shape"),
        ({"shape": (4, -1)}, "shape"),
        ({"shape": (4.0,)}, "shape"),
        ({"shape": (2**32,)}, "shape"),
        ({"shard_axis": 2}, "shard_axis"),
        ({"shard_axis": -1}, "shard_axis"),
        ({"shard_axis": 0.0}, "shard_axis"),
        ({"shard_axis": 2**70}, "shard_axis"),
        ({"shard_axis": 0, "shard_units": 3}, "shard_units"),
        ({"shard_axis": 0, "shard_units": 0}, "shard_units"),
        ({"shard_axis": 0, "shard_units": 8}, "shard_units"),
        ({"shard_units": 2}, "shard_units"),
    ],
)
def test_state_parts_are_checked(fields, words):
    with pytest.raises(ValueError, match=words):
        StateGroup(
            (0,), (StatePart(**{"name": "conv", "shape": (4, 6), "dtype": "int8", **fields}),)
        )


@pytest.mark.parametrize(
    "parts", [None, 5, (), (5,), (None,), StatePart("conv", (4,), "int8")], ids=label
)
def test_parts_are_checked(parts):
    with pytest.raises((ValueError, TypeError), match="part"):
        StateGroup((0,), parts)


def test_part_names_are_unique():
    part = StatePart("conv", (4,), "int8")
    with pytest.raises(ValueError, match=r"'?\"?conv\"?'? twice"):
        StateGroup((0,), (part, part))


@pytest.mark.parametrize(
    "groups", [None, 5, (), (5,), (None,), AttentionGroup((0,), 2, 4), "groups"], ids=label
)
def test_groups_are_checked(groups):
    with pytest.raises((ValueError, TypeError), match=r"(?i)group"):
        ModelSpec(groups)


def test_a_layer_has_one_attention_and_one_state():
    attention, state = (
        AttentionGroup((0, 1), 2, 4),
        StateGroup((0, 1), (StatePart("s", (4,), "int8"),)),
    )
    ModelSpec((attention, state))
    with pytest.raises(ValueError, match="layer 1 is in groups 0 and 1"):
        ModelSpec((attention, AttentionGroup((1, 2), 2, 4)))
    with pytest.raises(ValueError, match="layer 1 is in groups 0 and 2"):
        ModelSpec((attention, state, LatentGroup((1,), 4)))
    with pytest.raises(ValueError, match="layer 0 is in groups"):
        ModelSpec((state, state))


@pytest.mark.parametrize("field", ["tp_size", "pp_size", "cp_size", "cp_interleave"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=label)
def test_engine_sizes_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        make_engine(model=attention_model(layers=4), **{field: value})


@pytest.mark.parametrize("field", ["tokens_per_block", "physical_blocks_per_block"])
@pytest.mark.parametrize("value", [*NO_SIZES, (), (4, 4), (0,), (None,), ((4,),)], ids=label)
def test_per_group_counts_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        EngineSpec("a", attention_model(), **{"tokens_per_block": 4, "layout": "NHD", field: value})


@pytest.mark.parametrize(
    "value",
    [*(value for value in NO_SIZES if value is not None), (), (4, 4), (0,), ((4,),)],
    ids=label,
)
def test_num_blocks_is_checked(value):
    with pytest.raises(ValueError, match="num_blocks"):
        make_engine(num_blocks=value)


@pytest.mark.parametrize(
    "value", [1.0, float("nan"), "0", (), (0, 0), ("0",), (1.5,), object()], ids=label
)
def test_null_block_id_is_checked(value):
    with pytest.raises(ValueError, match="null_block_id"):
        make_engine(null_block_id=value)


@pytest.mark.parametrize(
    "value", [0, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, (None,), (-7,)], ids=label
)
def test_any_integer_may_be_the_null_block_id(value):
    assert make_engine(null_block_id=value).null_block_id == value


@pytest.mark.parametrize(
    "value",
    [None, 5, "", "XYZ", "KBNHX", (), ("NHD", "NHD"), ("BND",), "BND", (5,), b"NHD"],
    ids=label,
)
def test_engine_layout_is_checked(value):
    with pytest.raises(ValueError, match="layout"):
        make_engine(layout=value)


@pytest.mark.parametrize("value", [None, 5, b"a"], ids=label)
def test_engine_id_is_checked(value):
    with pytest.raises(ValueError, match="engine_id"):
        make_engine(value)


@pytest.mark.parametrize("value", [None, 5, {}, "model", AttentionGroup((0,), 2, 4)], ids=label)
def test_model_is_checked(value):
    with pytest.raises((ValueError, TypeError), match=r"(?i)model"):
        EngineSpec("a", value, 4, "NHD")


@pytest.mark.parametrize(
    "value",
    [
        5,
        "01",
        (),
        ((0, 2),),
        ((0, 2), (2, 3)),
        ((0, 2), (3, 4)),
        ((0, 2), (1, 4)),
        ((2, 4), (0, 2)),
        ((0, 4), (4, 4)),
        ((1, 2), (2, 4)),
        ((0, 2), None),
        ((0, 2), (2, 4), (4, 6)),
        ((0.0, 2), (2, 4)),
        ((0, 2), (2, -4)),
        ((0, 2), (2, 2**70)),
        (0, 4),
    ],
    ids=label,
)
def test_pipeline_stages_are_checked(value):
    with pytest.raises(ValueError, match="pp_layers"):
        make_engine(model=attention_model(layers=4), pp_size=2, pp_layers=value)


def test_uneven_pipelines_state_their_layers():
    with pytest.raises(ValueError, match=r"pp_layers .* pp_size=2 does not divide 5"):
        make_engine(model=attention_model(layers=5), pp_size=2)
    engine = make_engine(model=attention_model(layers=5), pp_size=2, pp_layers=[[0, 2], [2, 5]])
    assert engine.pp_layers == ((0, 2), (2, 5))
    assert [len(engine.tensor_slots(rank)) for rank in range(2)] == [2, 3]


@pytest.mark.parametrize(
    "value",
    [
        5,
        "01",
        (),
        ((0, 2),),
        ((0, 2), (2, 3)),
        ((0, 1), (2, 4)),
        ((0, 2), (2, 5)),
        ((0, 2), (2, 2), (2, 4)),
        ((0, 4), (3, 3)),
        ((2, 0), (0, 4)),
        ((-1, 2), (2, 4)),
        ((0, 2.0), (2, 4)),
        ((0, 2), None),
        (((0, 2), (2, 4)), None),
        (((0, 2),),),
        (((0, 2), (2, 3)),),
        ((0, 4),),
        ((0, 2), (2, 2**70)),
    ],
    ids=label,
)
def test_head_ranges_are_checked(value):
    with pytest.raises(ValueError, match="head_ranges"):
        make_engine(model=attention_model(heads=4), tp_size=2, head_ranges=value)


def test_groups_without_heads_have_no_head_ranges():
    split = ((0, 2), (2, 4))
    fields = {"tokens": 64, "layout": "BNHC", "tp_size": 2}
    make_engine("a", hybrid_model(), head_ranges=split, **fields)
    make_engine("a", hybrid_model(), head_ranges=(split, None, None), **fields)
    make_engine("a", hybrid_model(), head_ranges=(None, None, None), **fields)
    for wrong in ((split, split, None), (split, None, split), (split, None)):
        with pytest.raises(ValueError, match="head_ranges"):
            make_engine("a", hybrid_model(), head_ranges=wrong, **fields)


def test_group_layouts_fit_their_kinds():
    fields = {"tokens": 64, "tp_size": 2}
    make_engine("a", hybrid_model(), layout=("BNHC", "BND", "BS"), **fields)
    for wrong in (
        ("BND", "BND", "BS"),
        ("BNHC", "BNHD", "BS"),
        ("BNHC", "KBND", "BS"),
        ("BNHC", "BNC", "BS"),
        ("BNHC", "BND", "BND"),
        ("BNHC", "BS", "BS"),
        ("BS", "BND", "BS"),
    ):
        with pytest.raises(LayoutError, match="layout"):
            make_engine("a", hybrid_model(), layout=wrong, **fields)
    # Keys of 8 elements and values of 6 share no tensor with a K axis.
    with pytest.raises(LayoutError, match="head_dim=8 and v_head_dim=6"):
        make_engine("a", hybrid_model(), layout="NHD", **fields)


def test_block_sizes_are_multiples_of_what_divides_them():
    for wrong, words in (
        ({"tokens": 6, "cp_size": 4}, "cp_size"),
        ({"tokens": 8, "cp_size": 2, "cp_interleave": 8}, "cp_interleave"),
        ({"tokens": 8, "physical_blocks_per_block": 3}, "physical_blocks_per_block"),
    ):
        with pytest.raises(ValueError, match=f"tokens_per_block={wrong['tokens']} .*{words}"):
            make_engine(**wrong)
    slots_of_four = attention_model(tokens_per_slot=4)
    with pytest.raises(ValueError, match="tokens_per_slot"):
        make_engine(model=slots_of_four, tokens=6)
    with pytest.raises(ValueError, match=r"cp_interleave=2 .* tokens_per_slot=4"):
        make_engine(model=slots_of_four, tokens=16, cp_size=2, cp_interleave=2)
    make_engine(model=slots_of_four, tokens=16, cp_size=2, cp_interleave=4)


def test_rank_counts_are_bounded():
    with pytest.raises(ValueError, match="ranks"):
        make_engine(tp_size=2**14, cp_size=2, tokens=2**20)
    assert make_engine(tp_size=2**14).num_ranks == 2**14
