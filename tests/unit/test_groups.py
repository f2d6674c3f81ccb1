"""Engine groups: their structs on the wire, how many there are, and whose layers are whose."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from engines import label

from kvferry import groups
from kvferry.errors import BlockRangeError, OverlapError
from kvferry.groups import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
    engine_group_ids_per_view,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
)

# Two KV groups of engine group 0, one of engine group 2, none of engine group 1.
HYBRID = [EngineGroupInfo(0, (4, 0)), EngineGroupInfo(2, (1, 3)), EngineGroupInfo(0, (2, 4))]
TWO = [EngineGroupInfo(0), EngineGroupInfo(1)]


class OtherGroupInfo(msgspec.Struct, frozen=True):
    """The struct of a peer that knows more; its fields come in another order."""

    recurrent_state: bool = False
    sw_size_tokens: int = -1
    engine_group_id: int = 0
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0
    null_block_id: int | None = None


class OldGroupInfo(msgspec.Struct, frozen=True):
    """The struct of a peer that knows less."""

    engine_group_id: int
    layer_indices: tuple[int, ...] = ()


# Functions that look at the bounds of engine group ids, and all that look at the ids.
CHECKED = (
    num_engine_groups,
    engine_group_layer_indices,
    lambda groups: get_engine_group_indices(groups, 4),
    lambda groups: get_engine_group_indices(groups, 0),
    lambda groups: expand_engine_block_ids(groups, [[1], [2]]),
)
ALL_THAT_READ = (*CHECKED, engine_group_ids_per_view)


def test_the_excluded_group_is_no_group():
    assert EXCLUDED_ENGINE_GROUP == -1
    assert isinstance(EXCLUDED_ENGINE_GROUP, int)


def test_all_names_are_there():
    assert set(groups.__all__) == {
        "EXCLUDED_ENGINE_GROUP",
        "EngineGroupInfo",
        "engine_group_ids_per_view",
        "engine_group_layer_indices",
        "expand_engine_block_ids",
        "get_engine_group_indices",
        "num_engine_group_infos",
        "num_engine_groups",
        "slice_block_ids_per_group",
    }
    assert all(getattr(groups, name).__doc__ for name in groups.__all__)


def test_defaults():
    assert EngineGroupInfo(3) == EngineGroupInfo(3, (), 0, -1)
    with pytest.raises(TypeError):
        EngineGroupInfo()


def test_it_is_frozen_and_hashes():
    group = EngineGroupInfo(0, (1, 2), 16, 128)
    with pytest.raises(AttributeError):
        group.engine_group_id = 1
    assert hash(group) == hash(EngineGroupInfo(0, (1, 2), 16, 128))


def test_it_is_a_map_of_its_four_keys():
    message = msgspec.msgpack.encode(EngineGroupInfo(1, (0, 2)))
    assert msgspec.msgpack.decode(message) == {
        "engine_group_id": 1,
        "layer_indices": [0, 2],
        "tokens_per_block": 0,
        "sw_size_tokens": -1,
    }
    # One map of four entries: no field is left out because it has its default.
    assert message[0] == 0x84


def test_unknown_keys_are_ignored_and_missing_ones_take_their_defaults():
    def decoded(fields):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=EngineGroupInfo)

    assert decoded({"engine_group_id": 7}) == EngineGroupInfo(7)
    fields = {"page_size_padded": {"a": [None]}, "engine_group_id": 7, "sw_size_tokens": 128}
    assert decoded(fields) == EngineGroupInfo(7, sw_size_tokens=128)
    with pytest.raises(msgspec.ValidationError):
        decoded({"layer_indices": [0]})
    with pytest.raises(msgspec.ValidationError):
        decoded([0, [0], 16, -1])


@pytest.mark.parametrize("other", [OtherGroupInfo, OldGroupInfo])
def test_peers_of_other_versions_understand_each_other(other):
    theirs = [other(engine_group_id=1, layer_indices=(0, 2)), other(engine_group_id=0)]
    ours = [EngineGroupInfo(1, (0, 2)), EngineGroupInfo(0)]
    message = msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(message, type=list[EngineGroupInfo]) == ours
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=list[other]) == theirs


def test_engine_groups():
    assert num_engine_groups(HYBRID) == 3
    assert num_engine_groups([EngineGroupInfo(5)]) == 6
    assert num_engine_groups(TWO) == 2
    assert num_engine_groups([]) == num_engine_groups(()) == 1


def test_kv_groups():
    assert num_engine_group_infos(HYBRID) == 3
    assert num_engine_group_infos(TWO) == 2
    assert num_engine_group_infos([]) == num_engine_group_infos(()) == 1


def test_ids_per_view():
    assert engine_group_ids_per_view(HYBRID) == (0, 2, 0)
    assert engine_group_ids_per_view([]) == (0,)
    assert isinstance(engine_group_ids_per_view(HYBRID), tuple)


def test_these_two_look_at_no_bound():
    odd = [EngineGroupInfo(-1), EngineGroupInfo(2**60), EngineGroupInfo(2**200)]
    assert engine_group_ids_per_view(odd) == (-1, 2**60, 2**200)
    assert num_engine_group_infos(odd) == 3


def test_their_numbers_are_plain_integers():
    ids = engine_group_ids_per_view([EngineGroupInfo(np.int16(3)), EngineGroupInfo(np.int64(-1))])
    assert ids == (3, -1)
    assert [type(number) for number in ids] == [int, int]


def test_structs_of_others_do_as_well():
    theirs = (
        OtherGroupInfo(engine_group_id=1, layer_indices=(2,)),
        OldGroupInfo(0, (0, 1)),
        SimpleNamespace(engine_group_id=np.uint8(1), layer_indices=np.array([3])),
    )
    assert num_engine_groups(theirs) == 2
    assert engine_group_ids_per_view(theirs) == (1, 0, 1)
    assert engine_group_layer_indices(theirs) == [[0, 1], [2, 3]]
    assert get_engine_group_indices(theirs, 4) == [0, 0, 1, 1]
    assert expand_engine_block_ids(theirs, [[5], [6]]) == [[6], [5], [6]]


def test_groups_may_come_from_an_iterator():
    assert num_engine_groups(iter(HYBRID)) == 3
    assert num_engine_groups(tuple(HYBRID)) == 3


def test_sorted_union_of_each_engine_group():
    assert engine_group_layer_indices(HYBRID) == [[0, 2, 4, 4], [], [1, 3]]
    assert engine_group_layer_indices([EngineGroupInfo(1)]) == [[], []]
    assert engine_group_layer_indices([]) == []


def test_engine_group_of_each_layer():
    assert get_engine_group_indices(HYBRID, 6) == [0, 2, 0, 2, 0, EXCLUDED_ENGINE_GROUP]
    assert get_engine_group_indices([EngineGroupInfo(0)], 2) == [-1, -1]
    assert get_engine_group_indices(HYBRID, np.int32(5)) == [0, 2, 0, 2, 0]


def test_nothing_where_there_are_no_groups_or_no_layers():
    assert get_engine_group_indices([], 4) is None
    assert get_engine_group_indices(HYBRID, 0) is None
    assert get_engine_group_indices([], 0) is None


@pytest.mark.parametrize("layer", [-1, 4, 2**40, -(2**63), 2**63, -(2**70)], ids=label)
@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_outside_is_refused(layer, strict):
    wrong = [EngineGroupInfo(0, (0,)), EngineGroupInfo(2, (1, layer))]
    expected = rf"layer {layer} of engine group 2 is outside registered layer range \[0, 4\)"
    with pytest.raises(BlockRangeError, match=expected):
        get_engine_group_indices(wrong, 4, strict=strict)


def test_a_layer_of_two_engine_groups_goes_to_the_last():
    claimed = [EngineGroupInfo(1, (0, 1)), EngineGroupInfo(0, (1,))]
    assert get_engine_group_indices(claimed, 2) == [1, 0]
    assert get_engine_group_indices(claimed[::-1], 2) == [1, 1]
    with pytest.raises(OverlapError, match=r"layer 1 is claimed by engine groups 1 and 0"):
        get_engine_group_indices(claimed, 2, strict=True)


def test_a_layer_that_one_engine_group_names_twice_is_no_conflict():
    assert get_engine_group_indices(HYBRID, 5, strict=True) == [0, 2, 0, 2, 0]


def test_layers_that_are_too_far_for_64_bits_have_no_order():
    assert engine_group_layer_indices([EngineGroupInfo(0, (2**62, -1))]) == [[-1, 2**62]]
    with pytest.raises(BlockRangeError, match=f"layer {2**63} of engine group 0"):
        engine_group_layer_indices([EngineGroupInfo(0, (2**63,))])


@pytest.mark.parametrize("number", [-1, 2**20 + 1, 2**60, 2**70, None, 1.0, "4"], ids=label)
def test_a_number_of_layers_is_bounded(number):
    for some in ([], HYBRID):
        with pytest.raises(ValueError, match=r"registered.layers"):
            get_engine_group_indices(some, number)


@pytest.mark.parametrize("function", CHECKED)
@pytest.mark.parametrize("group_id", [-1, -(2**63), 2**16, 2**31, 2**60, 2**200], ids=label)
def test_ids_outside_their_bound(function, group_id):
    with pytest.raises(ValueError, match=rf"engine.group.id.{group_id} is .*\[0, 65536\)"):
        function([EngineGroupInfo(0, (0,)), EngineGroupInfo(group_id, (1,))])


def test_the_bound_itself():
    assert num_engine_groups([EngineGroupInfo(2**16 - 1)]) == 2**16


@pytest.mark.parametrize("function", ALL_THAT_READ)
@pytest.mark.parametrize("group_id", [None, "0", 1.0, np.float64(0), (0,)], ids=label)
def test_ids_that_are_no_numbers(function, group_id):
    with pytest.raises(ValueError, match="engine_group_id="):
        function([SimpleNamespace(engine_group_id=group_id, layer_indices=())])


@pytest.mark.parametrize("function", ALL_THAT_READ)
@pytest.mark.parametrize("wrong", [None, 5, [5], [None], "ab", [{"engine_group_id": 0}]])
def test_what_is_no_group(function, wrong):
    with pytest.raises(ValueError, match="groups="):
        function(wrong)


@pytest.mark.parametrize("layers", [None, 5, ("0",), (1.0,), (None,), "01"], ids=label)
def test_what_is_no_layer(layers):
    wrong = [SimpleNamespace(engine_group_id=0, layer_indices=layers)]
    for function in (engine_group_layer_indices, CHECKED[2]):
        with pytest.raises(ValueError, match="layer_indices="):
            function(wrong)


def test_endless_lists_end():
    endless = iter(lambda: EngineGroupInfo(0), None)
    with pytest.raises(ValueError, match="groups holds more than 65536"):
        num_engine_groups(endless)
    wrong = [SimpleNamespace(engine_group_id=0, layer_indices=range(2**40))]
    with pytest.raises(ValueError, match="more than 1048576 layers"):
        engine_group_layer_indices(wrong)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_is_not_swallowed(raised):
    class Interrupted:
        @property
        def engine_group_id(self):
            raise raised

    for function in ALL_THAT_READ:
        with pytest.raises(raised):
            function([Interrupted()])


def test_a_wild_id_takes_no_memory():
    program = """
import resource
from kvferry.groups import *
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for group_id in (2**31, 2**40, 2**60):
    for function in (num_engine_groups, engine_group_layer_indices):
        try:
            function([EngineGroupInfo(group_id)])
        except ValueError:
            print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "refused\n" * 6), done.stderr
