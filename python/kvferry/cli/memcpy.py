"""The machine's plain memcpy, as the measure beside which copies are timed."""

from __future__ import annotations

import ctypes
import time

import numpy as np

# Two buffers far beyond any cache, copied over and over until enough bytes have moved.
BUFFER_BYTES = 256 << 20


class MemcpyTimer:
    """Times libc's memcpy of so many bytes, on one thread, between pages touched before."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        size = min(num_bytes, BUFFER_BYTES)
        self._source = np.full(size, 1, np.uint8)
        self._target = np.full(size, 2, np.uint8)

    def seconds(self) -> float:
        """Return the seconds that one copy takes."""
        source, target = self._source.ctypes.data, self._target.ctypes.data
        rest = self._num_bytes
        begin = time.perf_counter()
        while rest > 0:
            step = min(rest, BUFFER_BYTES)
            # memmove of buffers that do not overlap is memcpy.
            ctypes.memmove(target, source, step)
            rest -= step
        return time.perf_counter() - begin
