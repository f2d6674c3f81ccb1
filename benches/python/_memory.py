"""Large memory, block ids in random order, and what the machine can do with it at best."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).parents[2]
TOTAL_BYTES = 512 << 20  # of either side: far more than any cache holds
HUGE_PAGE_BYTES = 2 << 20


def touched_memory(*, huge_pages: bool = True) -> np.ndarray:
    """Return elements of two bytes whose pages exist, so that no copy pays for their first touch.

    Huge pages are what numpy asks for with every large array; memory that a driver has pinned, or
    that torch has allocated, is in pages of 4 KiB as a rule.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, TOTAL_BYTES + HUGE_PAGE_BYTES, flags=flags)
    pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    begin = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory = memory[begin : begin + TOTAL_BYTES].view(np.uint16)
    memory.fill(1)
    return memory


def shuffled(count: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count).astype(np.int64)


def memcpy(target: np.ndarray, source: np.ndarray, threads: int) -> Callable[[], None]:
    """Return the C library's copy of contiguous bytes, cut evenly among threads."""
    return partial(
        library().bench_memcpy, target.ctypes.data, source.ctypes.data, source.nbytes, threads
    )


def memcpy_each(
    targets: np.ndarray, sources: np.ndarray, num_bytes: int, threads: int
) -> Callable[[], None]:
    """Return one `memcpy` of so many bytes for each pair of addresses."""
    assert len(targets) == len(sources)

    def run() -> None:
        ends = targets.ctypes.data, sources.ctypes.data
        library().bench_memcpy_each(*ends, len(targets), num_bytes, threads)

    return run


def streams(target: np.ndarray, source: np.ndarray, threads: int) -> dict[str, Callable[[], None]]:
    """Return sequential copies past the caches, one for each width of vectors there is."""
    ends = target.ctypes.data, source.ctypes.data, source.nbytes
    return {
        f"stream, {vector_bytes} bytes": partial(
            library().bench_stream, *ends, threads, vector_bytes
        )
        for vector_bytes in (32, 64)
        if library().bench_can_stream(vector_bytes)
    }


def limit(seconds: Mapping[str, float]) -> float:
    """Return the best of the streams and of `memcpy`, both over contiguous bytes."""
    return min(seconds[name] for name in seconds if name.startswith(("stream, ", "memcpy")))


@cache
def library() -> ctypes.CDLL:
    """Build the C library of the bench crate, unless it is up to date, and load it."""
    build = ["cargo", "build", "--release", "--quiet", "-p", "kvferry-benches", "--lib"]
    subprocess.run(build, check=True, cwd=REPOSITORY)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    found = ctypes.CDLL(str(folder / f"libkvferry_benches.{suffix}"))
    size, address = ctypes.c_size_t, ctypes.c_void_p
    for name, arguments in (
        ("bench_memcpy", [address, address, size, size]),
        ("bench_memcpy_each", [address, address, size, size, size]),
        ("bench_stream", [address, address, size, size, size]),
        ("bench_can_stream", [size]),
    ):
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    found.bench_can_stream.restype = ctypes.c_bool
    return found
