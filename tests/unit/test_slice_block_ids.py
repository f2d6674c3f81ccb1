"""Block ids that cover a token range: lists are copied, arrays are viewed."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from engines import label
from id_lists import COPIED, NO_IDS, NO_LISTS, VIEWED, numbers, shares_memory

from kvferry.errors import AlignmentError, BlockRangeError
from kvferry.groups import slice_block_ids_per_group


def test_each_group_by_its_own_blocks():
    allocated = {0: list(range(100, 164)), 1: list(range(200, 216))}
    sliced = slice_block_ids_per_group(allocated, [4, 16], 64, 128)
    assert sliced == [list(range(116, 132)), [204, 205, 206, 207]]


@pytest.mark.parametrize("as_ids", COPIED.values(), ids=COPIED.keys())
def test_sequences_come_back_as_lists_of_their_own(as_ids):
    ids = as_ids([5, 6, 7, 8])
    sliced = slice_block_ids_per_group({0: ids, 1: ids, 2: ids}, [16, 16, 8], 16, 48)
    assert [list(map(int, each)) for each in sliced] == [[6, 7], [6, 7], [7, 8]]
    assert all(type(each) is list for each in (sliced, *sliced))
    sliced[0].append(9)
    assert list(ids) == [5, 6, 7, 8] and sliced[1] == [6, 7]


@pytest.mark.parametrize("as_ids", COPIED.values(), ids=COPIED.keys())
def test_a_slice_of_everything_is_a_list_of_its_own(as_ids):
    ids = as_ids([5, 6])
    (sliced,) = slice_block_ids_per_group({0: ids}, [16], 0, 32)
    assert type(sliced) is list and sliced == [5, 6]
    sliced.append(9)
    assert list(ids) == [5, 6]


@pytest.mark.parametrize("as_ids", VIEWED.values(), ids=VIEWED.keys())
def test_arrays_come_back_as_views(as_ids):
    ids = as_ids([5, 6, 7, 8])
    sliced = slice_block_ids_per_group({0: ids, 1: ids}, [16, 8], 16, 24 + 8)
    assert [numbers(view) for view in sliced] == [[6], [7, 8]]
    assert all(shares_memory(view, ids) for view in sliced)


def test_a_missing_group_holds_none():
    assert slice_block_ids_per_group({1: [3]}, [16, 16, 16], 0, 16) == [[], [3], []]
    assert slice_block_ids_per_group({}, [16], 0, 16) == [[]]
    assert slice_block_ids_per_group({}, [], 0, 16) == []


def test_mappings_of_any_kind():
    class Asked(Mapping):
        def __getitem__(self, key):
            return {0: [1, 2]}[key]

        def __iter__(self):
            return iter([0])

        def __len__(self):
            return 1

    class Redirected(dict):
        def get(self, key, default=None):
            return super().get(key + 10, default)

    made = defaultdict(lambda: [9], {0: [1, 2]})
    for allocated in (UserDict({0: [1, 2]}), MappingProxyType({0: [1, 2]}), Asked(), made):
        assert slice_block_ids_per_group(allocated, [16, 16], 0, 32) == [[1, 2], []]
    assert slice_block_ids_per_group(Redirected({10: [1, 2]}), [16], 0, 32) == [[1, 2]]
    assert set(made) == {0}


def test_keys_may_be_numpy_integers():
    allocated = {np.int64(0): [1], np.int32(1): [2]}
    assert slice_block_ids_per_group(allocated, [16, 16], 0, 16, strict=True) == [[1], [2]]


def test_arguments_may_be_numpy_integers():
    begin, end = np.int64(16), np.uint8(32)
    for sizes in ([np.int32(16)], (16,), np.array([16]), range(16, 17)):
        assert slice_block_ids_per_group({0: [1, 2]}, sizes, begin, end) == [[2]]


@pytest.mark.parametrize(
    ("begin", "end"), [(8, 64), (0, 56), (8, 8), (64, 8), (1, 2), (2**62 + 1, 2**62 + 1)]
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_range_that_does_not_align_is_refused(begin, end, strict):
    expected = rf"range \[{begin}, {end}\) does not align to group 1 of 16 tokens per block"
    with pytest.raises(AlignmentError, match=expected):
        slice_block_ids_per_group({}, [1, 16], begin, end, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_range_that_is_empty_or_backwards_covers_nothing(strict):
    ids = np.arange(4)
    for begin, end in ((16, 16), (48, 16), (64, 0), (640, 64), (640, 640)):
        allocated = {0: [1, 2, 3, 4], 1: ids}
        listed, viewed, missing = slice_block_ids_per_group(
            allocated, [16, 16, 16], begin, end, strict=strict
        )
        assert listed == missing == []
        assert isinstance(viewed, np.ndarray) and viewed.shape == (0,) and viewed.base is not None


def test_fewer_ids_than_needed():
    values = np.arange(10)
    allocated = {0: [1, 2, 3], 1: values, 2: (4,)}
    sliced = slice_block_ids_per_group(allocated, [16, 2, 16], 16, 64)
    assert [numbers(ids) for ids in sliced] == [[2, 3], [8, 9], []]
    with pytest.raises(BlockRangeError, match=r"group 0 needs 4 .* \[16, 64\), held 3"):
        slice_block_ids_per_group(allocated, [16, 2, 16], 16, 64, strict=True)
    with pytest.raises(BlockRangeError, match=r"group 1 needs 32 .*held 10"):
        slice_block_ids_per_group({**allocated, 0: range(4)}, [16, 2, 16], 16, 64, strict=True)
    with pytest.raises(BlockRangeError, match=r"group 1 needs 1 .*held 0"):
        slice_block_ids_per_group({0: [1]}, [64, 64], 0, 64, strict=True)


def test_surplus_keys():
    for key in (1, -1, 2**70, "0", None, (0,)):
        allocated = {0: [1], key: [2]}
        assert slice_block_ids_per_group(allocated, [16], 0, 16) == [[1]]
        with pytest.raises(BlockRangeError, match=r"ids of group .* outside \[0, 1\)"):
            slice_block_ids_per_group(allocated, [16], 0, 16, strict=True)


def test_ids_that_are_left_over_are_no_surplus():
    assert slice_block_ids_per_group({0: [1, 2, 3]}, [16], 0, 16, strict=True) == [[1]]


@pytest.mark.parametrize("size", [0, -1, -16, 2**63, None, 16.0, "16"], ids=label)
@pytest.mark.parametrize("strict", [False, True])
def test_tokens_per_block_are_positive(size, strict):
    with pytest.raises(ValueError, match=r"group_tokens_per_block\[1\]=|group 1 is 0"):
        slice_block_ids_per_group({0: [1]}, [16, size], 0, 16, strict=strict)


@pytest.mark.parametrize("position", [-16, -1, 2**63, 2**200, None, 16.0, "16"], ids=label)
def test_positions_are_not_negative(position):
    with pytest.raises(ValueError, match="start_token_idx="):
        slice_block_ids_per_group({0: [1]}, [16], position, 16)
    with pytest.raises(ValueError, match="end_token_idx="):
        slice_block_ids_per_group({0: [1]}, [16], 0, position)


def test_positions_beyond_every_list():
    far = 2**62
    assert slice_block_ids_per_group({0: [1], 1: range(3)}, [1, 2], far, 2 * far - 2) == [
        [],
        [],
    ]
    with pytest.raises(BlockRangeError, match=f"needs {far}"):
        slice_block_ids_per_group({0: [1]}, [1], 0, far, strict=True)


@pytest.mark.parametrize("wrong", [None, 5, [[1]], "0", (1,), iter([]), object()], ids=label)
def test_what_is_no_mapping_is_refused(wrong):
    with pytest.raises(ValueError, match="allocated_block_ids="):
        slice_block_ids_per_group(wrong, [16], 0, 16)


@pytest.mark.parametrize("wrong", [None, 16, object()], ids=label)
def test_what_is_no_list_of_sizes_is_refused(wrong):
    with pytest.raises(ValueError, match="group_tokens_per_block="):
        slice_block_ids_per_group({0: [1]}, wrong, 0, 16)


def test_sizes_without_end():
    with pytest.raises(ValueError, match="group_tokens_per_block holds more than 65536"):
        slice_block_ids_per_group({}, iter(lambda: 16, None), 0, 16)


@pytest.mark.parametrize("wrong", [*NO_LISTS, *NO_IDS], ids=label)
def test_what_is_no_list_of_ids_is_refused(wrong):
    with pytest.raises(ValueError, match=r"allocated_block_ids\[1\]"):
        slice_block_ids_per_group({0: [1], 1: wrong}, [16, 16], 0, 16)


def test_a_short_part_of_an_endless_range():
    assert slice_block_ids_per_group({0: range(2**60)}, [16], 32, 64) == [[2, 3]]
