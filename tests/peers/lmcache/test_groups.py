"""Engine groups: LMCache's own module and kvferry's stand-in give the same results."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache.v1.multiprocess import group_view as theirs

from kvferry.integrations import lmcache as ours

EXCLUDED = "EXCLUDED_ENGINE_GROUP"
NUM_LAYERS = 12


@pytest.fixture(autouse=True, scope="module")
def excluded_engine_group():
    """Give LMCache its constant: the module around it needs CUDA tools to be imported."""
    source = Path(theirs.__file__).parents[1] / "kv_layer_groups.py"
    (value,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == EXCLUDED
    )
    module = ModuleType("lmcache.v1.kv_layer_groups")
    setattr(module, EXCLUDED, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield


fields = st.fixed_dictionaries(
    {"engine_group_id": st.integers(0, 3)},
    optional={
        "layer_indices": st.lists(st.integers(0, NUM_LAYERS - 1), max_size=4).map(tuple),
        "tokens_per_block": st.sampled_from([0, 1, 16, 256]),
        "sw_size_tokens": st.sampled_from([-1, 1, 128, 4096]),
    },
)
group_lists = st.lists(fields, max_size=6)
ids = st.lists(st.integers(0, 1 << 40), max_size=5)
sequences = ids | ids.map(tuple)


def both(fields_list):
    """Return the same groups as LMCache's structs and as kvferry's."""
    return [[system.EngineGroupInfo(**given) for given in fields_list] for system in (theirs, ours)]


def outcome(function, *arguments):
    """Return what a function gives, or that it refuses."""
    try:
        return function(*arguments)
    except ValueError as error:
        return "refused", "outside registered layer range" in " ".join(str(error).split())


def outcomes(name, fields_list, *arguments):
    """Return what a function of each system makes of the same groups."""
    systems = zip((theirs, ours), both(fields_list), strict=True)
    return [outcome(getattr(system, name), groups, *arguments) for system, groups in systems]


@given(group_lists)
@pytest.mark.parametrize(
    "name",
    [
        "num_engine_groups",
        "num_engine_group_infos",
        "_engine_group_id_per_view",
        "engine_group_layer_indices",
    ],
)
def test_groups_are_counted_and_united_alike(name, fields_list):
    expected, found = outcomes(name, fields_list)
    assert found == expected
    assert type(found) is type(expected)


@given(group_lists, st.data())
def test_block_ids_are_expanded_alike(fields_list, data):
    needed = ours.num_engine_groups(both(fields_list)[1])
    block_ids = data.draw(st.lists(sequences, min_size=needed, max_size=needed + 2))
    expected, found = outcomes("expand_engine_block_ids", fields_list, block_ids)
    assert found == expected
    assert all(type(group) is list for group in found)


@given(st.lists(st.just({"engine_group_id": 0}), max_size=3), sequences)
def test_a_flat_list_is_the_one_group_s(fields_list, block_ids):
    expected, found = outcomes("expand_engine_block_ids", fields_list, block_ids)
    assert found == expected


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=4),
    st.dictionaries(st.integers(0, 5), sequences, max_size=6),
    st.integers(0, 48),
    st.integers(0, 48),
)
def test_ranges_are_sliced_alike(tokens_per_block, allocated, start, end):
    systems = [system.slice_block_ids_per_group for system in (theirs, ours)]
    if any(edge % tokens for edge in (start, end) for tokens in tokens_per_block):
        for slice_ids in systems:
            with pytest.raises(ValueError, match="does not align"):
                slice_ids(allocated, tokens_per_block, start, end)
    else:
        expected, found = (s(allocated, tokens_per_block, start, end) for s in systems)
        assert found == expected


@given(st.sampled_from([24, 48, 96]), st.integers(0, 4), st.integers(0, 4), st.data())
def test_aligned_ranges_are_sliced_alike(chunk_tokens, start, length, data):
    """As callers have it: the range is of whole chunks, of which every block size is a part."""
    tokens_per_block = data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 24]), max_size=4))
    allocated = {
        group: data.draw(st.lists(st.integers(0, 1 << 40), max_size=200))
        for group in range(len(tokens_per_block))
    }
    arguments = (
        allocated,
        tokens_per_block,
        start * chunk_tokens,
        (start + length) * chunk_tokens,
    )
    expected = theirs.slice_block_ids_per_group(*arguments)
    assert ours.slice_block_ids_per_group(*arguments) == expected


@given(group_lists, st.sampled_from([0, 1, NUM_LAYERS // 2, NUM_LAYERS, NUM_LAYERS + 3]))
def test_layers_find_the_same_group(fields_list, num_layers):
    expected, found = outcomes("get_engine_group_indices", fields_list, num_layers)
    assert found == expected


@given(group_lists)
def test_bytes_are_read_both_ways(fields_list):
    their_groups, our_groups = both(fields_list)
    encode = msgspec.msgpack.encode
    decode = msgspec.msgpack.decode
    assert decode(encode(their_groups), type=list[ours.EngineGroupInfo]) == our_groups
    assert decode(encode(our_groups), type=list[theirs.EngineGroupInfo]) == their_groups


@given(fields, st.integers(0, 3), st.booleans())
def test_fields_that_lmcache_adds_are_passed_over(given_fields, tag, recurrent):
    added = {"extra_object_group_tag": tag, "recurrent_state": recurrent}
    group = theirs.EngineGroupInfo(**given_fields, **added)
    (ours_alone,) = both([given_fields])[1]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=ours.EngineGroupInfo)
    assert decoded == ours_alone


def test_every_public_function_has_its_counterpart():
    public = [
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", None) == theirs.__name__
    ]
    assert len(public) >= 7
    assert [name for name in public if not hasattr(ours, name)] == []


def test_the_constant_is_the_same():
    from lmcache.v1.kv_layer_groups import EXCLUDED_ENGINE_GROUP

    assert ours.EXCLUDED_ENGINE_GROUP == EXCLUDED_ENGINE_GROUP
