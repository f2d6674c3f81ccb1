"""Block ids in the order of KV groups: lists are copied, arrays are viewed."""

from __future__ import annotations

import array
from collections import UserList

import numpy as np
import pytest
import torch
from engines import label
from id_lists import COPIED, NO_IDS, NO_LISTS, VIEWED, PlainSequence, numbers, shares_memory

from kvferry.errors import BlockRangeError
from kvferry.groups import EngineGroupInfo, expand_engine_block_ids

# Two KV groups of engine group 0, one of engine group 2, none of engine group 1.
HYBRID = [EngineGroupInfo(0), EngineGroupInfo(2), EngineGroupInfo(0)]
TWO = [EngineGroupInfo(0), EngineGroupInfo(1)]


@pytest.mark.parametrize("as_ids", COPIED.values(), ids=COPIED.keys())
def test_sequences_come_back_as_lists_of_their_own(as_ids):
    ids = as_ids([5, 6, 7])
    expanded = expand_engine_block_ids(HYBRID, [ids, (), as_ids([8, 9])])
    assert [list(map(int, each)) for each in expanded] == [[5, 6, 7], [8, 9], [5, 6, 7]]
    assert all(type(each) is list for each in (expanded, *expanded))
    expanded[0].append(10)
    assert list(ids) == [5, 6, 7] == expanded[2]


@pytest.mark.parametrize("as_ids", VIEWED.values(), ids=VIEWED.keys())
def test_arrays_come_back_as_views(as_ids):
    first, second = as_ids([5, 6, 7]), as_ids([8, 9])
    expanded = expand_engine_block_ids(HYBRID, [first, [], second])
    assert type(expanded) is list
    assert [numbers(each) for each in expanded] == [[5, 6, 7], [8, 9], [5, 6, 7]]
    for view, of in zip(expanded, (first, second, first), strict=True):
        assert shares_memory(view, of)


def test_a_view_sees_what_becomes_of_the_array():
    ids, tensor, plain = np.arange(3), torch.arange(3), array.array("i", range(3))
    views = expand_engine_block_ids([EngineGroupInfo(g) for g in range(3)], [ids, tensor, plain])
    ids[1] = tensor[1] = plain[1] = 70
    assert [numbers(view) for view in views] == [[0, 70, 2]] * 3
    assert isinstance(views[0], np.ndarray)
    assert isinstance(views[1], torch.Tensor)
    assert isinstance(views[2], memoryview)


@pytest.mark.parametrize("as_ids", {**COPIED, **VIEWED}.values(), ids={**COPIED, **VIEWED})
@pytest.mark.parametrize("some", [[], [EngineGroupInfo(0), EngineGroupInfo(0)]], ids=len)
@pytest.mark.parametrize("strict", [False, True])
def test_one_engine_group_may_be_given_flat(as_ids, some, strict):
    ids = as_ids([5, 6, 7])
    expanded = expand_engine_block_ids(some, ids, strict=strict)
    assert [numbers(each) for each in expanded] == [[5, 6, 7]] * max(len(some), 1)
    nested = expand_engine_block_ids(some, [ids], strict=strict)
    assert [numbers(each) for each in nested] == [[5, 6, 7]] * max(len(some), 1)


@pytest.mark.parametrize(
    "empty", [[], (), range(0), UserList(), np.array([]), np.array([], int), torch.tensor([])]
)
def test_flat_ids_may_be_none(empty):
    (flat,) = expand_engine_block_ids([], empty)
    (nested,) = expand_engine_block_ids([], [empty])
    assert len(flat) == len(nested) == 0
    if isinstance(empty, np.ndarray | torch.Tensor):
        assert type(flat) is type(nested) is type(empty)
    else:
        assert flat == nested == []


def test_flat_ids_come_back_as_a_list_or_view_of_their_own():
    ids = [1, 2]
    (copy,) = expand_engine_block_ids([], ids)
    copy.append(3)
    assert ids == [1, 2]
    values = np.array(ids)
    (view,) = expand_engine_block_ids([EngineGroupInfo(0)], values)
    assert view is not values and np.shares_memory(view, values)


def test_an_array_of_one_id_is_a_list_and_not_an_id():
    for one in (np.array([5]), torch.tensor([5]), [5]):
        assert numbers(expand_engine_block_ids([], [one])) == [[5]]
        assert [numbers(ids) for ids in expand_engine_block_ids(TWO, [one, [6]])] == [[5], [6]]


@pytest.mark.parametrize("as_rows", [np.array, torch.tensor])
def test_rows_of_an_array_are_one_list_a_group(as_rows):
    rows = as_rows([[1, 2], [3, 4], [5, 6]])
    expanded = expand_engine_block_ids(HYBRID, rows)
    assert [numbers(each) for each in expanded] == [[1, 2], [5, 6], [1, 2]]
    assert all(shares_memory(each, rows) for each in expanded)
    (only,) = expand_engine_block_ids([], rows[:1])
    assert numbers(only) == [1, 2]
    with pytest.raises(BlockRangeError, match="holds more lists for 2"):
        expand_engine_block_ids(TWO, rows, strict=True)


def test_lists_may_differ_in_kind():
    expanded = expand_engine_block_ids(
        [EngineGroupInfo(g) for g in range(4)], ([1], (2,), range(3, 5), np.array([5]))
    )
    assert [numbers(each) for each in expanded] == [[1], [2], [3, 4], [5]]


@pytest.mark.parametrize(
    "flat",
    [[1, 2], (1, 2), range(2), np.arange(2), torch.arange(2), [np.int64(1)], bytearray(2)],
)
def test_flat_ids_of_several_engine_groups_are_refused(flat):
    with pytest.raises(BlockRangeError, match="one flat list of block ids for 2 engine groups"):
        expand_engine_block_ids(TWO, flat)
    # A hole is an engine group too.
    with pytest.raises(BlockRangeError, match="one flat list of block ids for 2 engine groups"):
        expand_engine_block_ids([EngineGroupInfo(1)], flat)


@pytest.mark.parametrize("lists", [[], [[1]], ([1], (2,)), np.array([[1], [2]]), UserList([[1]])])
@pytest.mark.parametrize("strict", [False, True])
def test_fewer_lists_than_groups_are_refused(lists, strict):
    with pytest.raises(BlockRangeError, match=f"holds {len(lists)} lists? for 3 engine groups"):
        expand_engine_block_ids(HYBRID, lists, strict=strict)


def test_surplus_lists():
    lists = [[1], [2], [3], [4]]
    assert expand_engine_block_ids(TWO, lists) == [[1], [2]]
    assert expand_engine_block_ids([], lists) == [[1]]
    for some, held in ((TWO, 2), ([], 1)):
        with pytest.raises(BlockRangeError, match=f"holds more lists for {held} engine group"):
            expand_engine_block_ids(some, lists, strict=True)
        assert expand_engine_block_ids(some, lists[:held], strict=True) == lists[:held]


@pytest.mark.parametrize("wrong", NO_LISTS, ids=label)
def test_what_is_no_list_is_refused(wrong):
    with pytest.raises(ValueError, match="engine_side_block_ids"):
        expand_engine_block_ids(TWO, wrong)
    with pytest.raises(ValueError, match="engine_side_block_ids"):
        expand_engine_block_ids([], wrong)
    with pytest.raises(ValueError, match=r"engine_side_block_ids\[1\]"):
        expand_engine_block_ids(TWO, [[1], wrong])


@pytest.mark.parametrize("wrong", NO_IDS, ids=label)
def test_arrays_that_hold_no_ids_are_refused(wrong):
    with pytest.raises(ValueError, match=r"engine_side_block_ids\[1\]"):
        expand_engine_block_ids(TWO, [[1], wrong])


def test_a_subclass_is_asked_for_what_it_shows():
    class Shifted(list):
        """A list that shows other items than it stores."""

        def __getitem__(self, index):
            got = super().__getitem__(index)
            return [100 + item for item in got] if isinstance(index, slice) else 100 + got

    assert expand_engine_block_ids(TWO, [Shifted([1, 2]), [3]]) == [[101, 102], [3]]


def test_what_a_sequence_raises_comes_through():
    class Broken(PlainSequence):
        def __getitem__(self, index):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        expand_engine_block_ids(TWO, [[1], Broken([2])])


@pytest.mark.parametrize("count", [2**28 + 1, 2**40, 2**62, 2**63, 2**200], ids=label)
def test_a_range_longer_than_memory_is_refused(count):
    for given in ([[1], range(count)], range(count)):
        with pytest.raises(ValueError, match=r"more than 268435456|one flat list"):
            expand_engine_block_ids(TWO, given)
    with pytest.raises(ValueError, match="more than 268435456"):
        expand_engine_block_ids([], range(count))
