"""Block copies and in-place repairs of random tensors: every byte is where the model has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from block_models import (
    Strided,
    copy_by_hand,
    refused,
    repair_by_hand,
    strided,
    tensor_shapes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples

from kvferry import copy
from kvferry.errors import BlockRangeError, OverlapError

Draw = Callable[[st.SearchStrategy[Any]], Any]

TYPES = {
    1: (torch.uint8, torch.float8_e4m3fn, torch.int8),
    2: (torch.bfloat16, torch.float16),
    4: (torch.float32,),
    8: (torch.float64,),
}
REPAIRS = (
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "kv_postprocess_blksize_and_layout_on_receive",
)
THREADS = st.sampled_from((None, None, 1, 2, 5))


@st.composite
def memories(draw: Draw, shape: tuple[int, ...], item_bytes: int) -> Strided:
    """Memory of random bytes around an array whose dimensions nest in any order, with padding."""
    order = list(range(len(shape)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    return strided(
        shape,
        order,
        item_bytes=item_bytes,
        innermost_step=draw(st.sampled_from((1, 1, 1, 2, 3))),
        padding=[draw(st.sampled_from((0, 0, 0, 1, 5))) for _ in shape],
        margin=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 1 << 32)),
    )


@st.composite
def handed_over(draw: Draw, case: Strided) -> Any:
    """Return the array itself, or a torch tensor over its elements of a type of that size."""
    if draw(st.booleans()):
        return case.array
    return case.tensor(draw(st.sampled_from(TYPES[case.memory.itemsize])))


@st.composite
def block_ids(draw: Draw, count: int, length: int, *, unique: bool = True) -> Any:
    """Ids below `count`, in one of the containers that are accepted."""
    ids = draw(st.lists(st.integers(0, count - 1), min_size=length, max_size=length, unique=unique))
    form = draw(st.sampled_from((list, tuple, np.array, torch.tensor)))
    return form(ids) if ids else ids


@st.composite
def layouts(draw: Draw) -> str:
    """Draw any attention layout of the contract, its outer axes in any order."""
    outer = draw(st.sampled_from(("BNH", "BNHL", "BNHK", "BNHLK")))
    inner = "D" if "K" in outer else draw(st.sampled_from("CD"))
    return "".join(draw(st.permutations(outer))) + inner


def assert_memories(cases: Sequence[Strided], expected: Sequence[np.ndarray]) -> None:
    for case, memory in zip(cases, expected, strict=True):
        np.testing.assert_array_equal(case.memory, memory)


def twins(cases: Sequence[Strided]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return copies of the memories, and views of them that lie as the arrays do."""
    copies = [case.memory.copy() for case in cases]
    return copies, [
        np.lib.stride_tricks.as_strided(memory[case.begin :], case.array.shape, case.array.strides)
        for memory, case in zip(copies, cases, strict=True)
    ]


@settings(max_examples=examples(2))
@given(st.data(), st.sampled_from(REPAIRS), st.booleans())
def test_repairs_are_what_the_contract_says(
    data: st.DataObject, name: str, has_planes: bool
) -> None:
    """Rows that are named hold what they were sent, and no other byte has changed."""
    draw = data.draw
    ratio = 1 if name == REPAIRS[1] else draw(st.sampled_from((1, 2, 2, 3, 4, 6, 7)))
    tokens = ratio * draw(st.integers(1, 9))
    blocks, heads, dim = (draw(st.integers(1, limit)) for limit in (6, 9, 12))
    planes = (2,) if name == REPAIRS[1] and has_planes else ()
    item_bytes = draw(st.sampled_from((1, 2, 2, 4, 8)))
    case = draw(memories((blocks, *planes, tokens, heads, dim), item_bytes))
    rows = draw(block_ids(blocks, draw(st.integers(0, blocks))))
    given_cache = draw(handed_over(case))
    (expected,), (twin,) = twins([case])
    repair_by_hand(name, twin, rows, ratio)
    ratios = () if name == REPAIRS[1] else (ratio,)
    getattr(copy, name)(given_cache, rows, *ratios, threads=draw(THREADS))
    np.testing.assert_array_equal(case.memory, expected)


@settings(max_examples=examples(40))
@given(st.data(), st.sampled_from(REPAIRS))
def test_large_rows_are_repaired_alike(data: st.DataObject, name: str) -> None:
    """Rows of up to several MiB, where scratch memory that is bounded does not hold one."""
    draw = data.draw
    ratio = 1 if name == REPAIRS[1] else draw(st.sampled_from((1, 2, 3, 8, 16)))
    tokens = ratio * draw(st.integers(1, 400 // ratio))
    heads, item_bytes = draw(st.integers(1, 100)), draw(st.sampled_from((1, 2, 4)))
    dim = draw(st.integers(1, max(1, (6 << 20) // (tokens * heads * item_bytes))))
    case = draw(memories((2, tokens, heads, dim), item_bytes))
    given_cache = draw(handed_over(case))
    (expected,), (twin,) = twins([case])
    repair_by_hand(name, twin, [1], ratio)
    ratios = () if name == REPAIRS[1] else (ratio,)
    getattr(copy, name)(given_cache, [1], *ratios, threads=draw(THREADS))
    np.testing.assert_array_equal(case.memory, expected)


@settings(max_examples=examples(2))
@given(st.data(), layouts(), layouts())
def test_blocks_are_the_same_in_every_layout(
    data: st.DataObject, source_layout: str, target_layout: str
) -> None:
    """Blocks that are named hold the source's elements, and no other byte has changed."""
    draw = data.draw
    layers, tokens, heads, dim = (draw(st.integers(1, limit)) for limit in (3, 4, 3, 5))
    item_bytes, counts = draw(st.sampled_from((1, 2, 4, 8))), draw(_two_counts())
    source, target = (
        [
            draw(memories(shape, item_bytes))
            for shape in tensor_shapes(layout, dim, dim, L=layers, B=blocks, N=tokens, H=heads)
        ]
        for layout, blocks in zip((source_layout, target_layout), counts, strict=True)
    )
    length = draw(st.integers(0, counts[1]))
    source_ids = draw(block_ids(counts[0], length, unique=False))
    target_ids = draw(block_ids(counts[1], length))
    read = [case.memory.copy() for case in source]
    expected, views = twins(target)
    copy_by_hand(
        [case.array for case in source], views, source_ids, target_ids,
        source_layout=source_layout, target_layout=target_layout,
        key_dim=dim, layers=layers, tokens=tokens, heads=heads,
    )  # fmt: skip
    ends = [[draw(handed_over(case)) for case in cases] for cases in (source, target)]
    copy.copy_blocks(
        *(end[0] if len(end) == 1 and draw(st.booleans()) else end for end in ends),
        source_ids,
        target_ids,
        source_layout=source_layout,
        target_layout=target_layout,
        threads=draw(THREADS),
    )
    assert_memories(target, expected)
    assert_memories(source, read)


@settings(max_examples=examples(4))
@given(st.data(), st.sampled_from(("h2d", "d2h")))
def test_rows_are_the_same_by_name(data: st.DataObject, direction: str) -> None:
    """Rows that are named hold the source's, whatever shape and type each layer has."""
    draw = data.draw
    counts, names = draw(_two_counts()), "abc"[: draw(st.integers(0, 3))]
    length = draw(st.integers(0, counts[1]))
    source_ids = draw(block_ids(counts[0], length, unique=False))
    target_ids = draw(block_ids(counts[1], length))
    source, target = [], []
    for _ in names:
        row = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
        item_bytes = draw(st.sampled_from((1, 2, 4, 8)))
        source.append(draw(memories((counts[0], *row), item_bytes)))
        target.append(draw(memories((counts[1], *row), item_bytes)))
    expected, views = twins(target)
    for read, written in zip(source, views, strict=True):
        for from_, to in zip(source_ids, target_ids, strict=True):
            written[to] = read.array[from_]
    ends = [
        {name: draw(handed_over(case)) for name, case in zip(names, cases, strict=True)}
        for cases in (source, target)
    ]
    copy.copy_kv_blocks(*ends, source_ids, target_ids, direction, threads=draw(THREADS))
    assert_memories(target, expected)


@settings(max_examples=examples(8))
@given(st.data(), st.sampled_from((*REPAIRS, "copy_blocks", "copy_kv_blocks")), st.booleans())
def test_ids_with_one_fault_raise_and_change_nothing(
    data: st.DataObject, name: str, repeated: bool
) -> None:
    """An id that does not exist, or one that is there twice, is found before a byte moves."""
    draw = data.draw
    source, target = (draw(memories((5, 4, 2, 6), 2)) for _ in range(2))
    ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
    nowhere = st.one_of(st.integers(5, 1 << 70), st.integers(-(1 << 70), -1))
    bad = [*ids]
    bad.insert(draw(st.integers(0, len(ids))), draw(st.sampled_from(ids) if repeated else nowhere))
    good = [0] * len(bad)
    with refused(OverlapError if repeated else BlockRangeError, source.memory, target.memory):
        if name == "copy_blocks":
            layout = {"source_layout": "BNHC", "target_layout": "BNHC"}
            copy.copy_blocks(source.array, target.array, good, bad, **layout)
        elif name == "copy_kv_blocks":
            copy.copy_kv_blocks({"a": source.array}, {"a": target.array}, good, bad, "h2d")
        else:
            getattr(copy, name)(target.array, bad, *(() if name == REPAIRS[1] else (2,)))


def _two_counts() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 5), st.integers(1, 5))
