"""The emulated driver in the place of the real one, for processes that load it before any other.

Streams run when they are waited for, and not before. Devices 0 and 1 have access to each other's
memory, device 2 to its own only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from producers import CPU, CUDA, CUDA_MANAGED, Producer

from kvferry import _core

_WAITING_FOR_NO_OTHER = 1  # CU_STREAM_NON_BLOCKING


@cache
def driver() -> ctypes.CDLL:
    """Load it; whoever asks for the driver afterwards gets this one.

    Not when the module is imported: whatever looks for examples in docstrings imports this, too.
    """
    return ctypes.CDLL(_core._emulated_driver, mode=ctypes.RTLD_GLOBAL)


def _done(result: int) -> None:
    assert result == 0, f"the driver answers {result}"


@contextmanager
def _current(ordinal: int) -> Iterator[None]:
    context = ctypes.c_void_p()
    _done(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    _done(driver().cuCtxPushCurrent_v2(context))
    yield
    _done(driver().cuCtxPopCurrent_v2(ctypes.byref(context)))


def make_stream(ordinal: int = 0) -> int:
    stream = ctypes.c_void_p()
    with _current(ordinal):
        _done(driver().cuStreamCreate(ctypes.byref(stream), _WAITING_FOR_NO_OTHER))
    assert stream.value
    return stream.value


def wait(stream: int, ordinal: int = 0) -> None:
    with _current(ordinal):
        _done(driver().cuStreamSynchronize(ctypes.c_void_p(stream)))


class Place:
    """Memory of a device, or pinned memory (`None`); it stays until the process ends.

    All of it is the host's here, so that tests can look at it without a call.
    """

    def __init__(self, ordinal: int | None = 0, *, dlpack_device: tuple[int, int] | None = None):
        self.device = dlpack_device or ((CPU, 0) if ordinal is None else (CUDA, ordinal))
        self._ordinal = ordinal
        self._kept: list[Producer] = []

    def __repr__(self) -> str:
        return "pinned memory" if self._ordinal is None else f"device {self._ordinal}"

    def hold(self, content: np.ndarray) -> Any:
        address = ctypes.c_uint64()
        arguments = [ctypes.byref(address), ctypes.c_size_t(content.nbytes)]
        with _current(self._ordinal or 0):
            if self._ordinal is None:
                _done(driver().cuMemHostAlloc(*arguments, 0))
            elif self.device[0] == CUDA_MANAGED:
                _done(driver().cuMemAllocManaged(*arguments, 1))
            else:
                _done(driver().cuMemAlloc_v2(*arguments))
        memory = (ctypes.c_uint8 * content.nbytes).from_address(address.value)
        self.read(memory)[:] = content
        return memory

    def read(self, memory: Any) -> np.ndarray:
        return np.ctypeslib.as_array(memory)

    def tensor(
        self,
        memory: Any,
        offset_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item_bytes: int,
    ) -> Producer:
        tensor = Producer(
            tuple(shape),
            tuple(strides),
            device=self.device,
            bits=8 * item_bytes,
            byte_offset=offset_bytes,
            memory=memory,
        )
        self._kept.append(tensor)
        return tensor
