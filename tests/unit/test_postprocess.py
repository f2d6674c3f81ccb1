"""The functions that repair rows which a peer has filled by raw bytes, in place."""

from __future__ import annotations

import array
import subprocess
import sys

import numpy as np
import pytest
import torch
from block_models import refused, repair_by_hand, strided
from engines import label
from producers import Producer
from threads import assert_other_threads_run

from kvferry import copy
from kvferry.errors import BlockRangeError, LayoutError, OverlapError

BLKSIZE = "kv_postprocess_blksize_on_receive"
LAYOUT = "kv_postprocess_layout_on_receive"
BOTH = "kv_postprocess_blksize_and_layout_on_receive"
NAMES = [BLKSIZE, LAYOUT, BOTH]
TOKENS, HEADS, DIM, BLOCKS = 12, 5, 4, 6
SHAPE = (BLOCKS, TOKENS, HEADS, DIM)
each_function = pytest.mark.parametrize("name", NAMES)


def repair(name, cache, rows, ratio=2, **options):
    """Call the named function; the one for layouts alone has no ratio."""
    ratios = () if name == LAYOUT else (ratio,)
    return getattr(copy, name)(cache, rows, *ratios, **options)


def check(name, case, rows, ratio=2, *, given=None, **options):
    """Repair, and judge every byte of the memory around the cache."""
    expected = case.memory.copy()
    twin = np.lib.stride_tricks.as_strided(
        expected[case.begin :], case.array.shape, case.array.strides
    )
    repair_by_hand(name, twin, rows, 1 if name == LAYOUT else ratio)
    cache = case.array if given is None else given
    assert repair(name, cache, rows, ratio, **options) is None
    np.testing.assert_array_equal(case.memory, expected)


# Two tokens of three heads: the elements of a row of one letter each, in the order of reading.


def test_a_smaller_block_size_by_hand():
    """Read by head, "abcdef" is 2 blocks of one token: [2][3][1]."""
    cache = np.frombuffer(bytearray(b"......abcdef"), np.uint8).reshape(2, 3, 2, 1)
    copy.kv_postprocess_blksize_on_receive(cache.transpose(0, 2, 1, 3), [1], 2)
    # Token 0 has heads a, b, c and token 1 has d, e, f, each head's tokens beside each other.
    assert cache.tobytes() == b"......adbecf"


def test_a_layout_by_hand():
    """Read by token, "abcdef" is one head-major block: [3][2]."""
    cache = np.frombuffer(bytearray(b"......abcdef"), np.uint8).reshape(2, 2, 3, 1)
    copy.kv_postprocess_layout_on_receive(cache, [1])
    # Head 0 has tokens a, b, head 1 has c, d, head 2 has e, f.
    assert cache.tobytes() == b"......acebdf"


def test_a_smaller_block_size_and_a_layout_by_hand():
    """Read by token, "abcdefghijkl" is 2 head-major blocks of two tokens: [2][3][2]."""
    cache = np.frombuffer(bytearray(b"abcdefghijkl............"), np.uint8)
    copy.kv_postprocess_blksize_and_layout_on_receive(cache.reshape(2, 4, 3, 1), [0], 2)
    assert cache.tobytes() == b"acebdfgikhjl............"


def test_keys_and_values_by_hand():
    cache = np.frombuffer(bytearray(b"abcdefABCDEF............"), np.uint8)
    copy.kv_postprocess_layout_on_receive(cache.reshape(2, 2, 2, 3, 1), [0])
    assert cache.tobytes() == b"acebdfACEBDF............"


MEMORY = {
    "token-major": {},
    "head-major": {"memory_order": [0, 2, 1, 3]},
    "padded rows": {"padding": [7, 0, 0, 0]},
    "padded tokens": {"padding": [0, 3, 0, 0]},
    "padded heads": {"padding": [0, 0, 2, 0]},
    "padded heads of a head-major one": {"memory_order": [0, 2, 1, 3], "padding": [5, 1, 2, 0]},
    "elements apart": {"innermost_step": 3},
    "elements apart in a head-major one": {"memory_order": [0, 2, 1, 3], "innermost_step": 2},
    "blocks between": {"memory_order": [1, 0, 2, 3], "padding": [1, 0, 0, 0]},
    "blocks innermost": {"memory_order": [1, 2, 3, 0]},
    "elements outermost": {"memory_order": [3, 2, 1, 0]},
    "elements between": {"memory_order": [0, 2, 3, 1], "padding": [0, 0, 0, 3]},
}


@each_function
@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 6, 12])
def test_memory_of_any_strides(name, memory, ratio):
    if name == LAYOUT and ratio > 1:
        ratio = 1
    check(name, strided(SHAPE, **memory), [4, 0, 3], ratio)


@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"padding": [3, 1, 0, 0, 0]},
        {"padding": [3, 1, 2, 1, 0]},
        {"memory_order": [1, 0, 2, 3, 4]},
        {"memory_order": [0, 1, 3, 2, 4]},
        {"memory_order": [0, 2, 3, 1, 4]},
        {"memory_order": [0, 3, 1, 2, 4], "innermost_step": 2},
        {"memory_order": [2, 3, 4, 1, 0]},
    ],
    ids=label,
)
def test_a_layout_with_a_key_and_a_value_plane(memory):
    check(LAYOUT, strided((BLOCKS, 2, TOKENS, HEADS, DIM), **memory), [4, 0, 3])


@each_function
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.int8,
    ],
)
def test_items_are_bytes_of_any_type(name, dtype):
    for memory in ({}, {"memory_order": [0, 2, 1, 3], "padding": [3, 0, 1, 0]}):
        case = strided(SHAPE, item_bytes=dtype.itemsize, **memory)
        check(name, case, [4, 0, 3], 3, given=case.tensor(dtype))


@each_function
@pytest.mark.parametrize(
    "shape",
    [
        (3, 1, 1, 1),
        (3, 1, 5, 4),
        (3, 6, 1, 4),
        (3, 6, 5, 1),
        (1, 6, 5, 4),
        (1, 2, 1, 1),
        (3, 2, 2, 1),
        (3, 6, 6, 8),
        (3, 64, 2, 128),
        (3, 16, 31, 7),
    ],
    ids=label,
)
def test_rows_of_many_sizes(name, shape):
    for ratio in (1, 2, shape[1]):
        if shape[1] % ratio == 0:
            for item_bytes in (1, 2):
                check(name, strided(shape, item_bytes=item_bytes), [0], ratio)
                head_major = strided(shape, [0, 2, 1, 3], item_bytes=item_bytes)
                check(name, head_major, range(shape[0] - 1, -1, -1), ratio)


# Beyond any scratch memory that would be bounded for its speed.
LARGE = {
    "long vectors": ((2, 96, 7, 4096), 8, {}),  # 5.25 MiB a row
    "vectors of a usual length": ((2, 512, 48, 128), 16, {}),  # 6 MiB
    "short vectors": ((2, 4096, 97, 8), 64, {}),  # 6 MiB
    "single elements": ((2, 1000, 2003, 1), 5, {}),  # 3.8 MiB
    "one head": ((2, 65536, 1, 32), 4, {}),
    "one token a small block": ((2, 256, 96, 128), 256, {}),
    "head-major": ((2, 512, 48, 128), 16, {"memory_order": [0, 2, 1, 3]}),
    "padded": ((2, 256, 96, 128), 4, {"padding": [64, 8, 16, 0]}),
    "elements apart": ((2, 256, 96, 64), 4, {"innermost_step": 2}),
    "blocks innermost": ((2, 256, 96, 64), 8, {"memory_order": [1, 2, 3, 0]}),
}


@each_function
@pytest.mark.parametrize(("shape", "ratio", "memory"), LARGE.values(), ids=LARGE.keys())
def test_rows_larger_than_any_scratch_memory(name, shape, ratio, memory):
    check(name, strided(shape, **memory), [1], ratio)


def test_a_large_row_of_bytes_of_two_planes():
    check(LAYOUT, strided((2, 2, 300, 7001, 1), item_bytes=1), [1])


@each_function
@pytest.mark.parametrize("threads", [1, 2, 1000, None])
def test_any_number_of_threads_gives_the_same_bytes(name, threads):
    """24 MiB: more than is done on one thread, in many rows, and in one."""
    rows = np.random.default_rng(0).permutation(200)[:192]
    check(name, strided((200, 32, 16, 128)), rows, 4, threads=threads)
    check(name, strided((2, 2048, 48, 128)), [1], 4, threads=threads)


@each_function
def test_no_temporary_of_a_tensor_is_made(name):
    """A row of 128 MiB, after which the process has not grown by a quarter of it."""
    program = f"""
import resource
import numpy as np
from kvferry import copy
cache = np.ones((1, 4096, 128, 128), np.uint16)
copy.{name}(cache[:, :4], [0], *{() if name == LAYOUT else (2,)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
copy.{name}(cache, [0], *{() if name == LAYOUT else (16,)!r})
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 32 << 10, f"grown by {{grown}} KiB"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@each_function
def test_only_the_rows_that_are_named_change(name):
    case = strided(SHAPE, padding=[4, 0, 0, 0])
    before = case.array.copy()
    repair(name, case.array, [2, 5])
    np.testing.assert_array_equal(case.array[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert not np.array_equal(case.array[2], before[2])
    assert not np.array_equal(case.array[5], before[5])


@each_function
@pytest.mark.parametrize(
    "empty", [[], (), range(0), np.array([], np.int64), torch.tensor([])], ids=label
)
def test_no_rows_change_nothing(name, empty):
    case = strided(SHAPE)
    check(name, case, empty)
    repair(name, case.array[:0], empty)


AS_INDICES = {
    "list": list,
    "tuple": tuple,
    "range": lambda rows: range(rows[0], rows[0] + len(rows)),
    "list of numpy": lambda rows: [np.int32(i) for i in rows],
    "list of torch": lambda rows: list(torch.tensor(rows)),
    **{
        kind: lambda rows, kind=kind: np.array(rows, kind)
        for kind in ("i1", "i2", "i4", "i8", "u1", "u4", "u8", ">i4")
    },
    "every other": lambda rows: np.array([[i, 99] for i in rows])[:, 0],
    "torch int64": torch.tensor,
    "torch int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "array": lambda rows: array.array("l", rows),
}


@each_function
@pytest.mark.parametrize("as_indices", AS_INDICES.values(), ids=AS_INDICES.keys())
def test_indices_come_in_any_integer_container(name, as_indices):
    case = strided(SHAPE)
    expected = case.array.copy()
    repair_by_hand(name, expected, [2, 3, 4], 1 if name == LAYOUT else 2)
    repair(name, case.array, as_indices([2, 3, 4]))
    np.testing.assert_array_equal(case.array, expected)


@each_function
def test_a_ratio_of_one_is_a_layout_or_nothing(name):
    case = strided(SHAPE)
    before = case.memory.copy()
    check(name, case, [4, 1], 1)
    # One head-major block read in its own order is in its place; read by token it is not.
    assert np.array_equal(case.memory, before) == (name == BLKSIZE)


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
@pytest.mark.parametrize("ratio", [1, 2, 3, 12])
def test_rows_that_a_peer_sent_are_read_right(memory, ratio):
    """A peer's blocks, written raw in the order of this cache's memory, come out as they were."""
    small = np.arange(2 * ratio * HEADS * (TOKENS // ratio) * DIM, dtype=np.uint16)
    # [rows, small blocks, heads, tokens, dim]: what each of two rows was sent.
    sent = small.reshape(2, ratio, HEADS, TOKENS // ratio, DIM)
    meant = sent.transpose(0, 1, 3, 2, 4).reshape(2, TOKENS, HEADS, DIM)

    def received(by_token):
        cache = strided(SHAPE, **memory).array
        for row, block in zip((4, 1), sent, strict=True):
            if by_token:
                cache[row] = block.reshape(TOKENS, HEADS, DIM)
            else:
                cache[row] = block.reshape(HEADS, TOKENS, DIM).transpose(1, 0, 2)
        return cache

    cache = received(by_token=False)
    copy.kv_postprocess_blksize_on_receive(cache, [4, 1], ratio)
    np.testing.assert_array_equal(cache[[4, 1]], meant)
    cache = received(by_token=True)
    copy.kv_postprocess_blksize_and_layout_on_receive(cache, [4, 1], ratio)
    np.testing.assert_array_equal(cache[[4, 1]], meant)
    if ratio == 1:
        cache = received(by_token=True)
        copy.kv_postprocess_layout_on_receive(cache, [4, 1])
        np.testing.assert_array_equal(cache[[4, 1]], meant)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize(
    ("mine", "peers", "repairs"),
    [
        # With blocks as large as these, and smaller ones: docs/layouts.md has the same table.
        ("NHD", "HND", (LAYOUT, BOTH)),
        ("HND", "HND", (None, BLKSIZE)),
        ("NHD", "NHD", (None, None)),
        ("HND", "NHD", (LAYOUT, LAYOUT)),
    ],
)
def test_which_repair_a_block_needs(mine, peers, repairs, ratio):
    meant = np.arange(TOKENS * HEADS * DIM).reshape(TOKENS, HEADS, DIM)
    smaller = np.split(meant, ratio)
    sent = [block.swapaxes(0, 1) if peers == "HND" else block for block in smaller]
    raw = np.concatenate([block.ravel() for block in sent])
    memory = np.zeros((BLOCKS, TOKENS * HEADS * DIM), int)
    memory[3] = raw
    if mine == "HND":
        by_head = memory.reshape(BLOCKS, HEADS, TOKENS, DIM)
        by_token = by_head.transpose(0, 2, 1, 3)
    else:
        by_token = memory.reshape(SHAPE)
    name = repairs[ratio > 1]
    # Where the two orders are exchanged, heads stand where the repair speaks of tokens.
    handed_over = by_head if (mine, peers) == ("HND", "NHD") else by_token
    if name is not None:
        assert not np.array_equal(by_token[3], meant)
        repair(name, handed_over, [3], ratio)
    np.testing.assert_array_equal(by_token[3], meant)


def test_two_repairs_one_after_another():
    """A layout repaired after a block size in the view of the memory's order is both at once."""
    apart, together = strided(SHAPE), strided(SHAPE)
    memory = apart.array.reshape(BLOCKS, HEADS, TOKENS, DIM)
    # The same memory, read by head: its elements in their order are what was received.
    copy.kv_postprocess_blksize_on_receive(memory.transpose(0, 2, 1, 3), [3], 4)
    copy.kv_postprocess_layout_on_receive(apart.array, [3])
    copy.kv_postprocess_blksize_and_layout_on_receive(together.array, [3], 4)
    np.testing.assert_array_equal(apart.memory, together.memory)


def test_a_layout_and_back():
    """Where heads and tokens change places in the shape too, the second repair undoes the first."""
    case = strided(SHAPE)
    before = case.memory.copy()
    copy.kv_postprocess_layout_on_receive(case.array, range(BLOCKS))
    assert not np.array_equal(case.memory, before)
    swapped = case.array.reshape(BLOCKS, HEADS, TOKENS, DIM)
    copy.kv_postprocess_layout_on_receive(swapped, range(BLOCKS))
    np.testing.assert_array_equal(case.memory, before)


@each_function
@pytest.mark.parametrize("row", [BLOCKS, 99, -1, -BLOCKS, 2**40, 2**63 - 1, -(2**63)], ids=label)
def test_rows_that_do_not_exist(name, row):
    case = strided(SHAPE)
    for rows in ([row], [0, 1, row], np.array([row, 1])):
        with refused(BlockRangeError, case.memory, match=rf"{row}\b.*\b{BLOCKS}\b"):
            repair(name, case.array, rows)


@each_function
@pytest.mark.parametrize("huge", [2**63, 2**64, 2**200, -(2**200)], ids=label)
def test_rows_beyond_64_bits_do_not_exist(name, huge):
    case = strided(SHAPE)
    with refused(BlockRangeError, case.memory, match=str(huge)):
        repair(name, case.array, [0, huge])


@each_function
@pytest.mark.parametrize("rows", [[1, 1], [2, 0, 2], np.array([5, 0, 5]), (3, 3)], ids=label)
def test_a_row_is_named_once(name, rows):
    case = strided(SHAPE)
    with refused(OverlapError, case.memory, match=rf"\b{rows[-1]}\b"):
        repair(name, case.array, rows)


@each_function
@pytest.mark.parametrize("wrong", [None, 5, "1", [1.0], [None], ["1"], {1}, [[1]]], ids=label)
def test_what_is_no_list_of_indices_is_refused(name, wrong):
    case = strided(SHAPE)
    with refused((TypeError, ValueError), case.memory):
        repair(name, case.array, wrong)


@pytest.mark.parametrize("name", [BLKSIZE, BOTH])
@pytest.mark.parametrize("ratio", [5, 7, 8, 13, 24, 0, -1, -2, 2**63, -(2**63), 2**200], ids=label)
def test_ratios_that_do_not_divide_a_block(name, ratio):
    case = strided(SHAPE)
    with refused(ValueError, case.memory, match=str(ratio)):
        repair(name, case.array, [1], ratio)


@pytest.mark.parametrize("name", [BLKSIZE, BOTH])
def test_a_ratio_that_does_not_divide_names_the_tokens(name):
    case = strided(SHAPE)
    with refused(ValueError, case.memory, match=rf"\b5\b.*\b{TOKENS}\b|\b{TOKENS}\b.*\b5\b"):
        repair(name, case.array, [1], 5)


@pytest.mark.parametrize("name", [BLKSIZE, BOTH])
@pytest.mark.parametrize("ratio", [None, "2", 1.5, float("nan"), [2], object()], ids=label)
def test_what_is_no_ratio_is_refused(name, ratio):
    case = strided(SHAPE)
    with refused((TypeError, ValueError), case.memory):
        repair(name, case.array, [1], ratio)


@pytest.mark.parametrize("name", [BLKSIZE, BOTH])
@pytest.mark.parametrize("ratio", [np.int64(3), np.uint8(3)], ids=label)
def test_a_ratio_may_be_a_numpy_integer(name, ratio):
    check(name, strided(SHAPE), [1], ratio)


@each_function
def test_read_only_memory_is_refused(name):
    case = strided(SHAPE)
    case.array.flags.writeable = False
    with refused(LayoutError, case.memory, match="read-only"):
        repair(name, case.array, [1])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (BLKSIZE, (6, 12, 20)),
        (BLKSIZE, (6, 2, 12, 5, 4)),
        (BLKSIZE, (24,)),
        (BLKSIZE, ()),
        (BOTH, (6, 12, 20)),
        (BOTH, (6, 2, 12, 5, 4)),
        (BOTH, (6, 2, 2, 12, 5, 4)),
        (LAYOUT, (6, 12, 20)),
        (LAYOUT, (6, 3, 12, 5, 4)),
        (LAYOUT, (6, 1, 12, 5, 4)),
        (LAYOUT, (2, 6, 12, 5, 4)),
        (LAYOUT, (6, 2, 2, 12, 5, 4)),
        (LAYOUT, (6,)),
    ],
    ids=label,
)
def test_a_cache_has_four_dimensions_or_a_key_and_a_value_plane(name, shape):
    cache = np.arange(np.prod(shape, dtype=int), dtype=np.uint16).reshape(shape)
    with refused(LayoutError, cache):
        repair(name, cache, [1])


@each_function
@pytest.mark.parametrize("wrong", [None, 5, "cache", [[[[1]]]], object()], ids=label)
def test_what_is_no_tensor_is_refused(name, wrong):
    with pytest.raises((TypeError, LayoutError)):
        repair(name, wrong, [0])


@each_function
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("reverse", [False, True])
def test_strides_are_positive(name, axis, reverse):
    memory = strided(SHAPE).array
    if reverse:
        bad = np.flip(memory, axis)
    else:
        steps = [0 if i == axis else step for i, step in enumerate(memory.strides)]
        bad = np.lib.stride_tricks.as_strided(memory, SHAPE, steps)
    with refused(LayoutError, memory):
        repair(name, bad, [1])


@each_function
def test_elements_that_overlap_are_refused(name):
    memory = np.arange(5000, dtype=np.uint16)
    row, token, head = TOKENS * HEADS * DIM * 2, HEADS * DIM * 2, DIM * 2
    for steps in (
        (row - 2, token, head, 2),
        (row, token - 2, head, 2),
        (row, token, head - 2, 2),
        (row, token, head, 8),
        (64, token, head, 2),
    ):
        bad = np.lib.stride_tricks.as_strided(memory, SHAPE, steps)
        with refused((LayoutError, OverlapError), memory):
            repair(name, bad, [1, 2])


@each_function
def test_the_stride_of_an_axis_of_size_one_is_not_looked_at(name):
    case = strided((BLOCKS, 4, 1, DIM))
    wild = np.lib.stride_tricks.as_strided(
        case.array, case.array.shape, (4 * DIM * 2, DIM * 2, 0, 2)
    )
    check(name, case, [4, 0], 2, given=wild)


@each_function
@pytest.mark.parametrize("threads", [0, -1, 2**200], ids=label)
def test_threads_are_checked(name, threads):
    case = strided(SHAPE)
    with refused(ValueError, case.memory, match="threads"):
        repair(name, case.array, [1], threads=threads)


@each_function
def test_other_threads_run_while_bytes_move(name):
    """64 MiB of rows."""
    cache = np.ones((512, 64, 8, 128), np.uint16)
    assert_other_threads_run(lambda: repair(name, cache, range(512), 4, threads=1))


@each_function
@pytest.mark.parametrize("stream", [None, 0, 1, 0x7F00_0000_0000])
def test_host_memory_needs_no_stream_and_may_have_one(name, stream):
    check(name, strided(SHAPE), [4, 1], 3, stream=stream)


@each_function
def test_a_tensor_is_given_back_once(name):
    for error, rows in ((None, [1]), (BlockRangeError, [10]), (OverlapError, [1, 1])):
        cache = Producer((10, 4, 2, 8))
        if error is None:
            repair(name, cache, rows)
        else:
            with pytest.raises(error):
                repair(name, cache, rows)
        assert cache.exported >= 1
        assert cache.deleted == cache.exported


def test_scratch_is_bounded():
    """A head that is longer than the scratch buffer is refused instead of allocated."""
    cache = np.zeros((1, 2, 2, (4 << 20) + 1), np.uint8)
    with refused(LayoutError, cache, match="heads of 4194305 bytes, more than 4194304"):
        copy.kv_postprocess_layout_on_receive(cache, [0])
    copy.kv_postprocess_layout_on_receive(cache[:, :, :1], [0])  # nothing has to move
