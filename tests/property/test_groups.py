"""Random engine groups and block-id lists, judged by a plain model of the contract's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AlignmentError, BlockRangeError, OverlapError
from kvferry.groups import (
    EngineGroupInfo,
    engine_group_ids_per_view,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
    slice_block_ids_per_group,
)

KV_GROUPS = st.lists(
    st.builds(
        EngineGroupInfo,
        engine_group_id=st.integers(0, 4),
        layer_indices=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    ),
    max_size=5,
)
IDS = st.lists(st.integers(0, 99), max_size=12)
AS_LISTS = st.sampled_from([list, tuple, np.array])


def numbers(ids: Any) -> list[int]:
    return [int(number) for number in ids]


@given(KV_GROUPS)
def test_counts_and_ids(groups):
    ids = [group.engine_group_id for group in groups] or [0]
    assert engine_group_ids_per_view(groups) == tuple(ids)
    assert num_engine_groups(groups) == max(ids) + 1
    assert num_engine_group_infos(groups) == len(ids)


@given(KV_GROUPS)
def test_layers_of_each_engine_group(groups):
    expected = [
        sorted(
            layer
            for group in groups
            for layer in group.layer_indices
            if group.engine_group_id == engine_group
        )
        for engine_group in range(num_engine_groups(groups))
    ]
    assert engine_group_layer_indices(groups) == (expected if groups else [])


@given(KV_GROUPS, st.integers(0, 9), st.booleans())
def test_engine_group_of_each_layer(groups, num_layers, strict):
    claims: dict[int, list[int]] = {}
    for group in groups:
        for layer in group.layer_indices:
            claims.setdefault(layer, []).append(group.engine_group_id)
    is_outside = any(layer >= num_layers for layer in claims)
    is_contested = any(len(set(claimed)) > 1 for claimed in claims.values())
    if not groups or num_layers == 0:
        assert get_engine_group_indices(groups, num_layers, strict=strict) is None
    elif is_outside or (strict and is_contested):
        with pytest.raises((BlockRangeError, OverlapError)) as raised:
            get_engine_group_indices(groups, num_layers, strict=strict)
        assert is_outside or raised.type is OverlapError
        assert (strict and is_contested) or raised.type is BlockRangeError
    else:
        expected = [claims.get(layer, [-1])[-1] for layer in range(num_layers)]
        assert get_engine_group_indices(groups, num_layers, strict=strict) == expected


@given(KV_GROUPS, st.lists(IDS, max_size=7), AS_LISTS, st.booleans())
def test_expanded_ids(groups, lists, as_lists, strict):
    wanted = [group.engine_group_id for group in groups] or [0]
    num_groups = max(wanted) + 1
    given_lists = [as_lists(ids) for ids in lists]
    if not lists and num_groups == 1:
        assert expand_engine_block_ids(groups, [], strict=strict) == [[] for _ in wanted]
    elif len(lists) < num_groups or (strict and len(lists) > num_groups):
        with pytest.raises(BlockRangeError, match=f"for {num_groups} engine groups?$"):
            expand_engine_block_ids(groups, given_lists, strict=strict)
    else:
        expanded = expand_engine_block_ids(groups, given_lists, strict=strict)
        assert [numbers(ids) for ids in expanded] == [lists[group] for group in wanted]
        assert len({id(ids) for ids in expanded}) == len(wanted)


@given(
    st.dictionaries(st.integers(0, 5), IDS, max_size=5),
    st.lists(st.integers(1, 8), max_size=5),
    st.integers(0, 24),
    st.integers(0, 24),
    st.booleans(),
    st.booleans(),
    AS_LISTS,
)
def test_sliced_ids_are_those_that_cover_the_tokens(
    allocated, sizes, begin, end, scaled, strict, as_lists
):
    if scaled:  # else hardly any range aligns to all groups
        begin, end = (position * int(np.lcm.reduce(sizes or [1])) for position in (begin, end))
    given_ids = {group: as_lists(ids) for group, ids in allocated.items()}
    arguments = (given_ids, sizes, begin, end)
    if any(begin % size or end % size for size in sizes):
        with pytest.raises(AlignmentError, match="does not align"):
            slice_block_ids_per_group(*arguments, strict=strict)
        return
    # Element `i` covers the tokens from `i * size`: ask each element, and each token that is due.
    expected = [
        [
            block
            for index, block in enumerate(allocated.get(group, []))
            if begin <= index * size and (index + 1) * size <= end
        ]
        for group, size in enumerate(sizes)
    ]
    is_short = any(
        token // size >= len(allocated.get(group, []))
        for group, size in enumerate(sizes)
        for token in range(begin, end, size)
    )
    has_surplus = any(group >= len(sizes) for group in allocated)
    if strict and (is_short or has_surplus):
        with pytest.raises(BlockRangeError):
            slice_block_ids_per_group(*arguments, strict=True)
    else:
        sliced = slice_block_ids_per_group(*arguments, strict=strict)
        assert [numbers(ids) for ids in sliced] == expected
