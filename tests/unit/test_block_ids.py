"""Block ids: the containers that they come in, and ids that do not exist."""

from __future__ import annotations

import array
import re

import numpy as np
import pytest
import torch
from engines import (
    BLOCK_BYTES,
    attention_model,
    engine_pair,
    label,
    make_engine,
    moved,
    source_cache,
    target_cache,
)
from id_lists import DLPackOnly
from producers import ROCM, Producer

from kvferry import Route
from kvferry.errors import BlockRangeError, KVFerryError

SOURCE, TARGET = make_engine("source"), make_engine("target")
ROUTE = Route(SOURCE, TARGET)

AS_IDS = {
    "list": list,
    "tuple": tuple,
    "int16": lambda ids: np.array(ids, np.int16),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big endian": lambda ids: np.array(ids, ">i8"),
    "big endian unsigned": lambda ids: np.array(ids, ">u4"),
    "backwards": lambda ids: np.array(ids[::-1])[::-1],
    "every other": lambda ids: np.array([[i, 99] for i in ids])[:, 0],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), np.int64),
    "unaligned": lambda ids: np.frombuffer(b"\0" + np.array(ids).tobytes(), np.int64, offset=1),
    "packed record": lambda ids: np.array([(1, i) for i in ids], [("a", "i1"), ("b", "i8")])["b"],
    "packed narrow record": lambda ids: np.array([(1, i) for i in ids], [("a", "i1"), ("b", "i4")])[
        "b"
    ],
    "packed unsigned record": lambda ids: np.array(
        [(1, i) for i in ids], [("a", "i1"), ("b", "u8")]
    )["b"],
    "list of numpy": lambda ids: [np.int32(i) for i in ids],
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch int64": lambda ids: torch.tensor(ids),
    "torch uint8": lambda ids: torch.tensor(ids, dtype=torch.uint8),
    "torch strided": lambda ids: torch.tensor([[i, 99] for i in ids])[:, 0],
    "list of torch": lambda ids: list(torch.tensor(ids)),
    "array": lambda ids: array.array("l", ids),
    "memoryview": lambda ids: memoryview(array.array("i", ids)),
}
NO_LISTS = [None, 5, {0}, {0: 1}, "0", b"0", 1.0, np.array(0), np.array([[0]]), iter([0]), object()]


@pytest.mark.parametrize("as_ids", AS_IDS.values(), ids=AS_IDS.keys())
def test_ids_come_in_any_integer_container(as_ids):
    ids = [7, 3, 1, 8]
    plan = ROUTE.plan(0, [as_ids(ids)], [as_ids([2, 0, 5, 9])], tokens=(0, 16))
    assert moved(plan, SOURCE, TARGET) == [(12, 0, 4), (28, 8, 4), (4, 20, 4), (32, 36, 4)]
    assert (
        ROUTE.plan(0, (as_ids(ids),), (as_ids([2, 0, 5, 9]),), tokens=(0, 16)).num_bytes
        == 4 * BLOCK_BYTES
    )


def test_ids_may_be_ranges():
    plan = ROUTE.plan(0, [range(7, 3, -1)], [range(0, 8, 2)], tokens=(0, 16))
    assert moved(plan, SOURCE, TARGET) == [(28, 0, 4), (24, 8, 4), (20, 16, 4), (16, 24, 4)]


@pytest.mark.parametrize(
    "empty", [[], (), range(0), np.array([]), np.array([], np.int32), torch.tensor([])], ids=label
)
def test_lists_may_be_empty_where_nothing_is_due(empty):
    plan = ROUTE.plan(0, [empty], [empty], tokens=(4, 4))
    assert (plan.pairs, plan.num_bytes, plan.notify_only) == ((), 0, (0,))


@pytest.mark.parametrize("ids", NO_LISTS, ids=lambda ids: type(ids).__name__)
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_no_list_of_ids_is_refused(side, ids):
    lists = {"source_blocks": [[0]], "target_blocks": [[0]], f"{side}_blocks": [ids]}
    with pytest.raises(ValueError, match=rf"{side}_blocks\[0\]|{side}_blocks is one flat list"):
        ROUTE.plan(0, **lists, tokens=(0, 4))


def route_of_two_groups():
    model = attention_model(layers=2).regroup([[0], [1]])
    return Route(make_engine("source", model), make_engine("target", model))


@pytest.mark.parametrize(
    ("flat", "shown"),
    [
        ([3, 2], "[[3, 2]]"),
        ([3], "[[3]]"),
        ((3, 2), "[(3, 2)]"),
        (range(2), "[range(0, 2)]"),
        (np.array([3, 2]), "[array([3, 2])]"),
        (torch.tensor([3, 2]), "[tensor([3, 2])]"),
    ],
    ids=label,
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_flat_list_is_told_from_one_list_a_group(side, flat, shown):
    lists = {"source_blocks": [[0, 1]], "target_blocks": [[0, 1]], f"{side}_blocks": flat}
    message = (
        f"{side}_blocks is one flat list for 1 group; "
        f"pass one list of block ids a group, such as {shown}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ROUTE.plan(0, **lists, tokens=(0, 4))
    two = route_of_two_groups()
    message = message.replace("1 group;", "2 groups;")[:-1] + ", …]"
    both = {"source_blocks": [[0], [1]], "target_blocks": [[0], [1]], f"{side}_blocks": flat}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        two.plan(0, **both, tokens=(0, 4))


@pytest.mark.parametrize("wrong", ["ab", b"ab", "", {0: [0]}, {}], ids=label)
def test_text_and_mappings_hold_no_lists(wrong):
    message = f"target_blocks={wrong!r} is not one list of block ids a group"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ROUTE.plan(0, [[0]], wrong, tokens=(0, 4))


@pytest.mark.parametrize(("lists", "held"), [([], "0 lists"), ([[0], [1]], "more lists")])
def test_the_number_of_lists_is_that_of_groups(lists, held):
    message = f"source_blocks holds {held} for 1 group; pass one list of block ids a group"
    with pytest.raises(ValueError, match=f"^{message}$"):
        ROUTE.plan(0, lists, [[0]], tokens=(0, 4))


def test_an_id_among_lists_is_named():
    two = route_of_two_groups()
    with pytest.raises(ValueError, match=r"^source_blocks\[1\] is 5; pass a list"):
        two.plan(0, [[3], 5], [[0], [1]], tokens=(0, 4))


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint64], ids=label)
def test_ids_may_speak_nothing_but_dlpack(dtype):
    ids = DLPackOnly(np.array([7, 3, 1, 8], dtype))
    plan = ROUTE.plan(0, [ids], [DLPackOnly(np.array([2, 0, 5, 9]))], tokens=(0, 16))
    assert moved(plan, SOURCE, TARGET) == [(12, 0, 4), (28, 8, 4), (4, 20, 4), (32, 36, 4)]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (np.array([[7]]), "is not one-dimensional"),
        (np.array([7.0]), "does not hold integers"),
        (np.array([True]), "does not hold integers"),
        (np.array(7), "is <"),
    ],
)
def test_dlpack_without_a_list_of_ids_is_refused(ids, why):
    with pytest.raises(ValueError, match=rf"source_blocks\[0\] {why}"):
        ROUTE.plan(0, [DLPackOnly(ids)], [[0]], tokens=(0, 4))


def test_dlpack_of_another_device_is_no_list_of_ids():
    ids = Producer((4,), device=(ROCM, 0), bits=64)
    with pytest.raises(ValueError, match=r"^source_blocks\[0\] is no list of block ids;"):
        ROUTE.plan(0, [ids], [[0]], tokens=(0, 4))


@pytest.mark.parametrize(
    "ids",
    [
        [None],
        [1.0],
        ["0"],
        [[0]],
        [(0,)],
        [float("nan")],
        [object()],
        [b"0"],
        [np.float64(0)],
        np.array([0.0]),
        np.array([True]),
        np.array(["0"]),
        np.array([0], object),
        np.array([0], "M8[s]"),
        torch.tensor([0.0]),
        torch.tensor([True]),
        torch.tensor([0.0], requires_grad=True),
    ],
    ids=label,
)
def test_what_is_no_id_is_refused(ids):
    with pytest.raises(ValueError, match=r"source_blocks\[0\]"):
        ROUTE.plan(0, [ids], [[0]], tokens=(0, 4))


@pytest.mark.parametrize("wrong", [None, 5, [], [[0], [0]], object()], ids=label)
@pytest.mark.parametrize("side", ["source", "target"])
def test_there_is_one_list_a_group(side, wrong):
    lists = {"source_blocks": [[0]], "target_blocks": [[0]], f"{side}_blocks": wrong}
    with pytest.raises(ValueError, match=f"{side}_blocks"):
        ROUTE.plan(0, **lists, tokens=(0, 4))


@pytest.mark.parametrize("huge", [2**63, 2**64 - 1, -(2**63) - 1, 2**200, -(2**200)], ids=label)
def test_ids_beyond_64_bits_do_not_exist(huge):
    with pytest.raises(BlockRangeError, match=f"block id {huge}"):
        ROUTE.plan(0, [[huge]], [[0]], tokens=(0, 4))
    if 0 < huge < 2**64:
        with pytest.raises(BlockRangeError, match=f"block id {huge}"):
            ROUTE.plan(0, [np.array([huge], np.uint64)], [[0]], tokens=(0, 4))


def test_a_list_longer_than_memory_is_refused_and_not_fatal():
    """A wrong range is a wrong argument; it must not end the process."""
    import subprocess
    import sys

    program = """
import resource
from kvferry import AttentionGroup, EngineSpec, ModelSpec, Route
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
engine = EngineSpec("a", ModelSpec((AttentionGroup((0,), 2, 4),)), 4, "BNHC")
try:
    Route(engine, engine).plan(0, [range(10**13)], [[0]], tokens=(0, 4))
except (ValueError, MemoryError):
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "refused\n")


@pytest.mark.parametrize("count", [2**61, 2**62, 2**63, 2**200], ids=label)
def test_a_list_longer_than_an_address_is_refused(count):
    with pytest.raises((ValueError, MemoryError)):
        ROUTE.plan(0, [range(count)], [[0]], tokens=(0, 4))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_ids_are_read_is_not_swallowed(raised):
    class Interrupted:
        def __index__(self):
            raise raised

        def __array__(self, *args, **kwargs):
            raise raised

    for ids in ([Interrupted()], Interrupted()):
        with pytest.raises(raised):
            ROUTE.plan(0, [ids], [[0]], tokens=(0, 4))


@pytest.mark.parametrize("side", ["source", "target"])
def test_negative_ids_fail_whether_due_or_not(side):
    lists = {"source_blocks": [[1, 2, 3]], "target_blocks": [[4, 5, 6]]}
    for place in range(3):
        wrong = {**lists, f"{side}_blocks": [list(lists[f"{side}_blocks"][0])]}
        wrong[f"{side}_blocks"][0][place] = -1
        with pytest.raises(BlockRangeError, match=f"block id -1 of group 0 .*{side}"):
            ROUTE.plan(0, **wrong, tokens=(4, 8))


@pytest.mark.parametrize("side", ["source", "target"])
def test_known_upper_bounds_are_checked_in_plan(side):
    bounded = Route(*engine_pair(**{side: {"num_blocks": 10}}))
    lists = {"source_blocks": [[9, 2]], "target_blocks": [[9, 5]]}
    bounded.plan(0, **lists, tokens=(0, 4))
    lists[f"{side}_blocks"] = [[9, 10]]
    with pytest.raises(
        BlockRangeError, match=rf"block id 10 of group 0 .*{side}.* \[0, 10\)"
    ) as caught:
        bounded.plan(0, **lists, tokens=(0, 4))  # block 10 is not due
    assert isinstance(caught.value, (ValueError, IndexError)) and isinstance(
        caught.value, KVFerryError
    )
    assert isinstance(caught.value, IndexError)


def test_unknown_upper_bounds_are_checked_when_tensors_are_bound():
    plan = ROUTE.plan(0, [[10]], [[2]], tokens=(0, 4))
    for run in (plan.descriptors, plan.copy):
        with pytest.raises(BlockRangeError, match=r"block id 10 of group 0 .*source.* \[0, 10\)"):
            run(source_cache(SOURCE), target_cache(TARGET))
    plan = ROUTE.plan(0, [[2]], [[2**63 - 1]], tokens=(0, 4))
    with pytest.raises(BlockRangeError, match=r"block id 9223372036854775807 .*target"):
        plan.copy(source_cache(SOURCE), target_cache(TARGET))
    # An id that is not due is never looked up.
    ROUTE.plan(0, [[2, 99]], [[3, 99]], tokens=(0, 4)).copy(
        source_cache(SOURCE), target_cache(TARGET)
    )


@pytest.mark.parametrize("ids", [[-(2**63), 1], np.array([-(2**63), 1])], ids=["list", "array"])
def test_no_id_passes_for_a_null_block_that_no_array_can_hold(ids):
    far = Route(*engine_pair(source={"null_block_id": 2**70}, target={"null_block_id": 2**70}))
    with pytest.raises(BlockRangeError, match="block id -9223372036854775808"):
        far.plan(0, [ids], [[0, 1]], tokens=(4, 8))
    with pytest.raises(BlockRangeError, match="block id -9223372036854775808"):
        far.plan(0, [[0, 1]], [ids], tokens=(0, 8))
    assert far.plan(0, [[2**70, 1]], [[0, 1]], tokens=(4, 8)).num_bytes > 0
    # Where it is the null block itself, it is one.
    near = Route(*engine_pair(target={"null_block_id": -(2**63)}))
    assert near.plan(0, [[0, 1]], [ids], tokens=(0, 4)).num_bytes == 0


def test_an_interrupt_while_a_length_is_asked_is_not_swallowed():
    class Interrupted(list):
        def __len__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ROUTE.plan(0, [Interrupted([1])], [[0]], tokens=(0, 4))
