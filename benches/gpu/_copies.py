"""What several scripts here copy: block ids in random order, and the loop that is beaten."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable

import torch
from _events import STREAM

# The driver's queue holds about a thousand calls behind a sleep, and then waits.
LOOP_BLOCKS = 512

_copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
_copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
_copy.restype = ctypes.c_int


def permutation(count: int, seed: int) -> torch.Tensor:
    """Return all ids below `count` in random order, on the host."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def in_turn(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """Return what makes the next of these calls each time, and begins again after the last."""
    turns = itertools.cycle(list(calls))  # all of them made before anything is measured
    return lambda: next(turns)()


def block_loop(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
) -> tuple[Callable[[], None], int]:
    """Return what copies the first blocks by a call of cuMemcpyAsync each, and their bytes."""
    block_bytes = source[0].nbytes
    ids = list(zip(source_ids.tolist(), target_ids.tolist(), strict=True))[:LOOP_BLOCKS]
    stream = ctypes.c_void_p(STREAM.cuda_stream)
    size = ctypes.c_size_t(block_bytes)
    prepared = [
        (
            ctypes.c_uint64(target.data_ptr() + target_id * block_bytes),
            ctypes.c_uint64(source.data_ptr() + source_id * block_bytes),
            size,
            stream,
        )
        for source_id, target_id in ids
    ]

    def run() -> None:
        for arguments in prepared:
            if answer := _copy(*arguments):
                raise RuntimeError(f"cuMemcpyAsync answers {answer}")

    return run, block_bytes * len(prepared)
