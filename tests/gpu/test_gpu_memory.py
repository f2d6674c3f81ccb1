"""Kinds of memory: not pinned, pinned in parts, and moved by the driver."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from elsewhere import Twins
from gpus import GPU, PINNED, back, numbers, on, on_gpu, some_ids
from producers import CUDA_MANAGED, Producer

from kvferry import copy
from kvferry.errors import LayoutError

pytestmark = on_gpu

# Bytes of each of two registrations; a multiple of any page's.
HALF_BYTES = 1 << 21


@pytest.mark.parametrize("is_upload", [True, False], ids=["upload", "download"])
def test_host_memory_has_to_be_pinned(is_upload):
    host, device = numbers((6, 64)), on(GPU, numbers((6, 64), 2))
    source, target = (host, device) if is_upload else (device, host)
    with pytest.raises(LayoutError, match=r"_kv_caches\['a'\].*not pinned"):
        copy.copy_kv_blocks({"a": source}, {"a": target}, [0], [1], "h2d")
    assert np.array_equal(back(device), numbers((6, 64), 2))
    assert np.array_equal(host, numbers((6, 64)))


@pytest.fixture
def halves():
    """Memory of which two calls have pinned a half each."""
    memory = np.empty(2 * HALF_BYTES + mmap.PAGESIZE, np.uint8)
    lead = -memory.ctypes.data % mmap.PAGESIZE
    memory = memory[lead : lead + 2 * HALF_BYTES]
    memory[:] = numbers((HALF_BYTES,)).view(np.uint8)
    runtime = torch.cuda.cudart()
    begins = [memory.ctypes.data, memory.ctypes.data + HALF_BYTES]
    for begin in begins:
        torch.cuda.check_error(runtime.cudaHostRegister(begin, HALF_BYTES, 0))
    yield memory
    torch.cuda.synchronize()
    for begin in begins:
        torch.cuda.check_error(runtime.cudaHostUnregister(begin))


@pytest.mark.parametrize("rows", [512, 1])
@pytest.mark.parametrize("is_upload", [True, False], ids=["upload", "download"])
def test_memory_that_was_pinned_in_two_parts_is_copied_or_refused(halves, is_upload, rows):
    host = halves.reshape(rows, -1)
    device = GPU.hold(numbers((rows, HALF_BYTES // rows), 2).view(np.uint8))
    in_order = slice(None, None, 1 if is_upload else -1)
    names = ({"a": tensor} for tensor in (host, device)[in_order])
    source, expected = (host.copy(), GPU.read(device))[in_order]
    ids = some_ids(rows, 3), some_ids(rows, 4)
    refusal = None
    try:
        copy.copy_kv_blocks(*names, *ids, "h2d")
    except LayoutError as error:
        refusal = str(error)
    else:
        expected[ids[1]] = source[ids[0]]
    torch.cuda.synchronize()
    assert refusal is None or "_kv_caches['a']" in refusal
    assert np.array_equal(GPU.read(device) if is_upload else host, expected)


class Managed:
    """Memory that the driver moves between host and GPU; it stays until the process ends."""

    def __repr__(self) -> str:
        return "managed memory"

    def hold(self, content):
        torch.cuda.synchronize()  # there is a context from here on
        driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        size, any_stream = ctypes.c_size_t(content.nbytes), ctypes.c_uint(1)
        assert driver.cuMemAllocManaged(ctypes.byref(address), size, any_stream) == 0
        memory = (ctypes.c_uint8 * content.nbytes).from_address(address.value)
        self.read(memory)[:] = content
        return memory

    def read(self, memory):
        return np.ctypeslib.as_array(memory)

    def tensor(self, memory, offset_bytes, shape, strides, item_bytes):
        return Producer(
            tuple(shape),
            tuple(strides),
            device=(CUDA_MANAGED, 0),
            bits=8 * item_bytes,
            byte_offset=offset_bytes,
            memory=memory,
        )


MANAGED = Managed()


@pytest.mark.parametrize(
    "ends",
    [(MANAGED, GPU), (GPU, MANAGED), (MANAGED, MANAGED), (PINNED, MANAGED), (MANAGED, PINNED)],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 200])
def test_managed_memory_is_copied(ends, rows):
    source, target = numbers((rows, 1000)), numbers((rows, 1000), 2)
    from_, to = Twins([source], ends[0]), Twins([target], ends[1])
    ids, stream = (some_ids(rows, 3), some_ids(rows, 4)), torch.cuda.Stream()
    copy.copy_kv_blocks(
        {"a": from_.tensors[0]}, {"a": to.tensors[0]}, *ids, "h2d", stream=stream.cuda_stream
    )
    expected = target.copy()
    expected[ids[1]] = source[ids[0]]
    stream.synchronize()
    assert not from_.differ()
    to.fetch()
    assert np.array_equal(target, expected)
