"""Block copies and repairs in place beside what people use today, at one thread count.

`memcpy` is libc's, on as many contiguous bytes: the most that any copy could hope for. A repair
reads and writes the same rows, in random order, of a cache of 512 MiB; every call takes the next
64 MiB of it, so that no contestant finds its bytes in a processor's cache. `torch` is what engines
do: gather the rows in bfloat16, permute, scatter them back. All memory is touched before.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import cycle

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads must not spin beside us

import torch
from _measure import medians, print_heading, print_table
from _memory import TOTAL_BYTES, memcpy, touched_memory

from kvferry import copy

TOKENS, HEADS, DIM, ITEM_BYTES = 16, 8, 256, 2
ROW_BYTES = TOKENS * HEADS * DIM * ITEM_BYTES  # 64 KiB
REPAIRED_BYTES = 64 << 20
LARGE_TOKENS = 512  # rows of 2 MiB, more than bounded scratch memory holds
RATIO = 4
LAYERS = 8

Bench = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of each contestant")
    parser.add_argument("--rounds", type=int, default=9, help="of every contestant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source, target = touched_memory(), touched_memory()
    source[:] = np.random.default_rng(0).integers(0, 1 << 16, size=source.size, dtype=np.uint16)
    bench = partial(medians, rounds=options.rounds)
    note = f"Medians of {options.rounds} interleaved rounds, threads={options.threads}"
    print_heading("Rows, and repairs in place", note)
    for tokens in (TOKENS, LARGE_TOKENS):
        compare_repairs(source, target, tokens, options.threads, bench)
    compare_rows(source, target, options.threads, bench)


def compare_repairs(
    memory: np.ndarray,
    other: np.ndarray,
    tokens: int,
    threads: int,
    bench: Bench,
) -> None:
    """Each repair of 64 MiB of rows in the memory that it is for, token-major or head-major."""
    row_bytes = tokens * HEADS * DIM * ITEM_BYTES
    rows = np.random.default_rng(1).permutation(TOTAL_BYTES // row_bytes)
    turns = [turn.astype(np.int64) for turn in np.split(rows, TOTAL_BYTES // REPAIRED_BYTES)]
    stretches = zip(np.split(other, len(turns)), np.split(memory, len(turns)), strict=True)
    contiguous = [memcpy(to, from_, threads) for to, from_ in stretches]
    lines = []
    for name, repair, by_torch, head_major in (
        (
            "blksize, head-major",
            partial(copy.kv_postprocess_blksize_on_receive, block_size_ratio=RATIO),
            torch_blksize,
            True,
        ),
        ("layout, token-major", copy.kv_postprocess_layout_on_receive, torch_layout, False),
        (
            "both, token-major",
            partial(copy.kv_postprocess_blksize_and_layout_on_receive, block_size_ratio=RATIO),
            torch_both,
            False,
        ),
    ):
        cache = bfloat16(memory).view(-1, tokens, HEADS, DIM)
        if head_major:
            cache = cache.view(-1, HEADS, tokens, DIM).transpose(1, 2)
        repair = partial(repair, threads=threads)
        check_repairs(repair, by_torch, cache, memory, turns[0])
        contestants = {
            "kvferry": in_turn(partial(repair, cache), turns),
            "memcpy": in_turn(lambda copy: copy(), contiguous),
            "torch": in_turn(partial(by_torch, cache), [torch.from_numpy(turn) for turn in turns]),
        }
        lines.append(line(name, bench(contestants), REPAIRED_BYTES))
    print_table(header(f"{len(turns[0])} rows of {row_bytes >> 10} KiB in place"), lines)


def torch_blksize(cache: torch.Tensor, rows: torch.Tensor) -> None:
    by_head = cache.transpose(1, 2)  # dense in memory
    small = by_head.index_select(0, rows).view(len(rows), RATIO, HEADS, -1, DIM)
    by_head.index_copy_(0, rows, small.transpose(1, 2).reshape(len(rows), HEADS, -1, DIM))


def torch_layout(cache: torch.Tensor, rows: torch.Tensor) -> None:
    by_head = cache.index_select(0, rows).view(len(rows), HEADS, -1, DIM)
    cache.index_copy_(0, rows, by_head.transpose(1, 2))


def torch_both(cache: torch.Tensor, rows: torch.Tensor) -> None:
    small = cache.index_select(0, rows).view(len(rows), RATIO, HEADS, -1, DIM)
    cache.index_copy_(0, rows, small.transpose(2, 3).reshape(len(rows), -1, HEADS, DIM))


def check_repairs(
    repair: Callable[..., object],
    by_torch: Callable[..., object],
    cache: torch.Tensor,
    memory: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Check that both leave the same bytes: a comparison of different work is none."""
    before = memory.copy()
    repair(cache, rows)
    repaired = memory.copy()
    assert not np.array_equal(repaired, before)
    memory[:] = before
    by_torch(cache, torch.from_numpy(rows))
    assert np.array_equal(memory, repaired), "torch leaves other bytes than kvferry"


def compare_rows(
    source: np.ndarray,
    target: np.ndarray,
    threads: int,
    bench: Bench,
) -> None:
    """Copy all rows of 8 layers, in random order on both sides."""
    names = [f"layers.{layer}" for layer in range(LAYERS)]
    sources, targets = (
        dict(zip(names, bfloat16(memory).view(LAYERS, -1, TOKENS, HEADS, DIM), strict=True))
        for memory in (source, target)
    )
    rng = np.random.default_rng(2)
    from_, to = (
        rng.permutation(TOTAL_BYTES // ROW_BYTES // LAYERS).astype(np.int64) for _ in range(2)
    )
    torch_from, torch_to = torch.from_numpy(from_), torch.from_numpy(to)

    def by_torch() -> None:
        for name, tensor in sources.items():
            targets[name].index_copy_(0, torch_to, tensor.index_select(0, torch_from))

    contestants = {
        "kvferry": lambda: copy.copy_kv_blocks(sources, targets, from_, to, "h2d", threads=threads),
        "memcpy": memcpy(target, source, threads),
        "torch": by_torch,
    }
    contestants["kvferry"]()
    copied = target.copy()
    target.fill(0)
    by_torch()
    assert np.array_equal(target, copied), "torch writes other bytes than kvferry"
    line_ = line("copy_kv_blocks", bench(contestants), TOTAL_BYTES)
    print_table(
        header(f"{TOTAL_BYTES >> 20} MiB, {LAYERS} layers, rows of {ROW_BYTES >> 10} KiB"), [line_]
    )


def header(case: str) -> list[str]:
    return [case, "ms", "memcpy, ms", "torch, ms", "GB/s", "of memcpy's", "faster than torch by"]


def line(name: str, seconds: dict[str, float], num_bytes: int) -> list[str]:
    ferry = seconds["kvferry"]
    return [
        name,
        *(f"{seconds[each] * 1e3:.1f}" for each in ("kvferry", "memcpy", "torch")),
        f"{num_bytes / ferry / 1e9:.1f}",
        f"{seconds['memcpy'] / ferry:.2f}",
        f"{seconds['torch'] / ferry:.1f}x",
    ]


def in_turn(run: Callable[..., object], arguments: Iterable[object]) -> Callable[[], object]:
    """Return a call that takes the next of the arguments each time."""
    turns = cycle(arguments)
    return lambda: run(next(turns))


def bfloat16(memory: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)


if __name__ == "__main__":
    main()
