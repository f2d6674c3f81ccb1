"""Specs are values: they hash, compare, copy, travel, and can be regrouped."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import textwrap

import msgspec
import numpy as np
import pytest
from engines import hybrid_engine, hybrid_model, label, make_engine

from kvferry import (
    AttentionGroup,
    EngineSpec,
    KVCache,
    LatentGroup,
    Layout,
    ModelSpec,
    Route,
    StateGroup,
    StatePart,
)
from kvferry.wire import TransferRequest


@pytest.mark.parametrize("make", [hybrid_model, hybrid_engine])
def test_specs_hash_and_compare_by_value(make):
    one, other = make(), make()
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    with pytest.raises(AttributeError):
        one.name = "other"


@pytest.mark.parametrize("as_given", [list, tuple, np.array, iter, set, dict.fromkeys], ids=label)
def test_layers_in_any_container_make_equal_specs(as_given):
    """Either a container is refused or the spec is a value; it never holds a live object."""
    try:
        group = AttentionGroup(as_given([0, 1, 2]), 2, 4)
    except (TypeError, ValueError):
        return
    assert group == AttentionGroup((0, 1, 2), 2, 4)
    assert hash(group) == hash(AttentionGroup((0, 1, 2), 2, 4))
    assert ModelSpec((group,)) == ModelSpec((AttentionGroup((0, 1, 2), 2, 4),))


@pytest.mark.parametrize(
    "struct",
    [AttentionGroup, LatentGroup, StateGroup, StatePart, ModelSpec, EngineSpec, TransferRequest],
    ids=label,
)
def test_the_constructor_that_type_checkers_see_is_the_real_one(struct):
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    (seen,) = (each for each in ast.walk(tree) if getattr(each, "name", "") == "__init__")
    assert [argument.arg for argument in seen.args.args[1:]] == list(struct.__struct_fields__)
    defaults = tuple(map(ast.literal_eval, seen.args.defaults))
    assert defaults == struct.__struct_defaults__


def test_lists_become_tuples_in_every_field():
    model = ModelSpec([AttentionGroup([0, 1], 4, 8)])
    engine = EngineSpec(
        "a",
        model,
        [4],
        ["NHD"],
        tp_size=2,
        pp_layers=[[0, 2]],
        head_ranges=[[[0, 3], [1, 4]]],
        null_block_id=[None],
        physical_blocks_per_block=[1],
        num_blocks=[9],
    )
    assert (engine.pp_layers, engine.head_ranges) == (((0, 2),), (((0, 3), (1, 4)),))
    hash(engine)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
@pytest.mark.parametrize("make", [hybrid_model, hybrid_engine])
def test_specs_survive_a_message(make, codec):
    spec = make()
    copied = codec.decode(codec.encode(spec), type=type(spec))
    assert copied == spec and hash(copied) == hash(spec)
    model = getattr(copied, "model", copied)
    assert [type(group) for group in model.groups] == [AttentionGroup, LatentGroup, StateGroup]


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_an_engine_with_a_layout_object_survives_a_message(codec):
    engine = make_engine(layout=Layout("HND"))
    assert codec.decode(codec.encode(engine), type=EngineSpec).tensor_slots(0)[0].layout == "KBHND"


def test_groups_are_tagged_in_messages():
    encoded = msgspec.to_builtins(hybrid_model())
    assert [group["type"] for group in encoded["groups"]] == ["attention", "latent", "state"]


def test_messages_that_make_no_sense_are_refused():
    good = msgspec.to_builtins(hybrid_engine())
    for field, value in (
        ("tp_size", 0),
        ("layout", "XYZ"),
        ("num_blocks", -1),
        ("model", {"groups": []}),
    ):
        bad = msgspec.json.encode({**good, field: value})
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(bad, type=EngineSpec)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda spec: pickle.loads(pickle.dumps(spec)),
        msgspec.structs.replace,
    ],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
@pytest.mark.parametrize("make", [hybrid_model, hybrid_engine])
def test_specs_survive_copying(make, copied):
    spec = make()
    other = copied(spec)
    assert other == spec and hash(other) == hash(spec)
    if isinstance(other, EngineSpec):
        assert [slot.name for slot in other.tensor_slots(0)] == [
            s.name for s in spec.tensor_slots(0)
        ]


def test_copied_engines_pair_and_register():
    engine = make_engine()
    duplicate = copy.copy(engine)
    assert Route(duplicate, engine).readers(0) == (0,)
    KVCache(duplicate, 0, [np.zeros((1, 4, 2, 8), np.float16)])


def test_replacing_a_field_checks_it():
    assert len(msgspec.structs.replace(hybrid_engine(), tp_size=2).tensor_slots(1)) == 7
    with pytest.raises(ValueError, match="tp_size"):
        msgspec.structs.replace(hybrid_engine(), tp_size=0)
    with pytest.raises(ValueError, match="num_kv_heads"):
        msgspec.structs.replace(AttentionGroup((0,), 2, 4), num_kv_heads=0)


def test_regroup_splits_groups_in_the_given_order():
    model = ModelSpec((AttentionGroup(range(4), 2, 4), LatentGroup((4, 5), 8)), name="m")
    regrouped = model.regroup([[5], (3, 1), range(0, 3, 2), [4]])
    assert [group.layers for group in regrouped.groups] == [(5,), (3, 1), (0, 2), (4,)]
    kinds = [LatentGroup, AttentionGroup, AttentionGroup, LatentGroup]
    assert [type(group) for group in regrouped.groups] == kinds
    assert regrouped.name == "m"


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[0, 1, 2, 3]], "4"),
        ([[0, 1, 2, 3, 4], [5]], "one group"),
        ([[0, 1], [1, 2, 3], [4, 5]], "one group"),
        ([[0, 1, 2, 3], [4, 5], []], "one group"),
        ([[0, 1, 2, 3], [4, 5], [6]], "one group"),
        ([[0, 0, 1, 2, 3], [4, 5]], "twice"),
        ([], "every layer"),
    ],
)
def test_regroup_names_every_layer_once(lists, words):
    model = ModelSpec((AttentionGroup(range(4), 2, 4), LatentGroup((4, 5), 8)))
    with pytest.raises(ValueError, match=words):
        model.regroup(lists)


def test_regroup_tells_a_layers_attention_from_its_state():
    state = StateGroup((0, 1), (StatePart("s", (4,), "int8"),))
    model = ModelSpec((AttentionGroup((0, 1), 2, 4), state))
    regrouped = model.regroup([[0], [1], [0, 1]])
    assert [type(group) for group in regrouped.groups] == [
        AttentionGroup,
        AttentionGroup,
        StateGroup,
    ]
