"""Host copies beside what people use today: libc's memcpy, numpy and torch, at one thread count.

Both sides hold 512 MiB, far more than any cache, page-aligned and touched before; block ids are
shuffled on both sides. `kvferry` is `Plan.copy`, checks included; its plan is made before.

`memcpy` is one `ctypes.memmove` a block; what the calls from Python cost is measured with empty
blocks and subtracted, which leaves memcpy at its best. The re-layout has none: its runs are 256
bytes. `at once` gathers into a temporary and scatters from it, as index arrays have it; most of
that is the first touch of a fresh temporary, so `kept temporary` shows it without. `by block` is
a loop in Python over pairs of blocks, without any temporary.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads must not spin beside us

import torch
from _measure import medians, print_table

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Plan, Route

TOTAL_BYTES = 512 << 20
PAGE_BYTES = 4096
HEADS, HEAD_DIM, PLANES, ITEM_BYTES = 8, 128, 2, 2
TOKENS = TOTAL_BYTES // (PLANES * HEADS * HEAD_DIM * ITEM_BYTES)
MODEL = ModelSpec((AttentionGroup(layers=(0,), num_kv_heads=HEADS, head_dim=HEAD_DIM),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of each contestant")
    parser.add_argument("--rounds", type=int, default=7, help="of every contestant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source, target = touched_memory(), touched_memory()
    source[:] = np.random.default_rng(0).integers(0, 1 << 16, size=source.size, dtype=np.uint16)
    print(
        f"{TOTAL_BYTES >> 20} MiB in random order, medians of {options.rounds} interleaved rounds, "
        f"threads={options.threads} (numpy and memcpy: 1)"
    )
    for compare in (compare_blocks, compare_relayouts):
        compare(source, target, options.threads, options.rounds)


def compare_blocks(source: np.ndarray, target: np.ndarray, threads: int, rounds: int) -> None:
    """Whole blocks of 64 KiB, the same layout on both sides."""
    engines = [EngineSpec(side, MODEL, 16, "BKNHD") for side in ("prefill", "decode")]
    tensors = [memory.reshape(-1, PLANES, 16, HEADS, HEAD_DIM) for memory in (source, target)]
    sources, targets = shuffled(TOKENS // 16, seed=1), shuffled(TOKENS // 16, seed=2)
    plan, caches = prepare(engines, tensors, sources, targets)
    rows = [memory.view(np.int64).reshape(len(sources), -1) for memory in (source, target)]
    torch_rows = [torch.from_numpy(row) for row in rows]
    torch_sources, torch_targets = torch.from_numpy(sources), torch.from_numpy(targets)
    block_bytes = TOTAL_BYTES // len(sources)
    addresses = [
        (target.ctypes.data + to * block_bytes, source.ctypes.data + from_ * block_bytes)
        for to, from_ in zip(targets.tolist(), sources.tolist(), strict=True)
    ]

    kept = np.ones_like(rows[0])
    torch_kept = torch.from_numpy(kept)
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))

    def numpy_at_once() -> None:
        rows[1][targets] = rows[0][sources]

    def numpy_by_block() -> None:
        for from_, to in pairs:
            rows[1][to] = rows[0][from_]

    def torch_at_once() -> None:
        torch_rows[1].index_copy_(0, torch_targets, torch_rows[0].index_select(0, torch_sources))

    def torch_kept_temporary() -> None:
        torch.index_select(torch_rows[0], 0, torch_sources, out=torch_kept)
        torch_rows[1].index_copy_(0, torch_targets, torch_kept)

    def torch_by_block() -> None:
        for from_, to in pairs:
            torch_rows[1][to].copy_(torch_rows[0][from_])

    contestants = {
        "kvferry": lambda: plan.copy(*caches, threads=threads),
        "memcpy": lambda: memmove_each(addresses, block_bytes),
        "numpy, at once": numpy_at_once,
        "numpy, by block": numpy_by_block,
        "torch, at once": torch_at_once,
        "torch, kept temporary": torch_kept_temporary,
        "torch, by block": torch_by_block,
    }
    check_same(contestants, target)
    seconds = medians(
        {**contestants, "empty calls": lambda: memmove_each(addresses, 0)}, rounds=rounds
    )
    calls = seconds.pop("empty calls")
    seconds["memcpy"] -= calls
    print_ratios("64 KiB blocks", seconds)
    print(f"(subtracted from memcpy: {calls * 1e3:.2f} ms for {len(addresses):,} calls)\n")


def compare_relayouts(source: np.ndarray, target: np.ndarray, threads: int, rounds: int) -> None:
    """Head-major blocks of 16 tokens to token-major ones of 64, in runs of 256 bytes."""
    engines = [EngineSpec("prefill", MODEL, 16, "HND"), EngineSpec("decode", MODEL, 64, "NHD")]
    tensors = [
        source.reshape(PLANES, -1, HEADS, 16, HEAD_DIM),
        target.reshape(PLANES, -1, 64, HEADS, HEAD_DIM),
    ]
    sources, targets = shuffled(TOKENS // 16, seed=1), shuffled(TOKENS // 64, seed=2)
    plan, caches = prepare(engines, tensors, sources, targets)
    torch_tensors = [torch.from_numpy(tensor.view(np.int16)) for tensor in tensors]
    torch_sources, torch_targets = torch.from_numpy(sources), torch.from_numpy(targets)
    whole = (PLANES, len(targets), 64, HEADS, HEAD_DIM)

    pairs = [
        (from_, targets.item(position // 4), slice(position % 4 * 16, position % 4 * 16 + 16))
        for position, from_ in enumerate(sources.tolist())
    ]

    def numpy_at_once() -> None:
        gathered = tensors[0][:, sources].swapaxes(2, 3)  # [planes, blocks, 16, heads, head_dim]
        tensors[1][:, targets] = gathered.reshape(whole)

    def numpy_by_block() -> None:
        for from_, to, tokens in pairs:
            tensors[1][:, to, tokens] = tensors[0][:, from_].swapaxes(1, 2)

    def torch_at_once() -> None:
        gathered = torch_tensors[0].index_select(1, torch_sources).transpose(2, 3)
        torch_tensors[1].index_copy_(1, torch_targets, gathered.reshape(whole))

    def torch_by_block() -> None:
        for from_, to, tokens in pairs:
            torch_tensors[1][:, to, tokens].copy_(torch_tensors[0][:, from_].transpose(1, 2))

    contestants = {
        "kvferry": lambda: plan.copy(*caches, threads=threads),
        "numpy, at once": numpy_at_once,
        "numpy, by block": numpy_by_block,
        "torch, at once": torch_at_once,
        "torch, by block": torch_by_block,
    }
    check_same(contestants, target)
    print_ratios("HND 16 to NHD 64", medians(contestants, rounds=rounds))


def prepare(
    engines: list[EngineSpec], tensors: list[np.ndarray], sources: np.ndarray, targets: np.ndarray
) -> tuple[Plan, list[KVCache]]:
    plan = Route(*engines).plan(0, [sources], [targets], tokens=(0, TOKENS))
    assert plan.num_bytes == TOTAL_BYTES
    return plan, [
        KVCache(engine, 0, [tensor]) for engine, tensor in zip(engines, tensors, strict=True)
    ]


def memmove_each(addresses: list[tuple[int, int]], block_bytes: int) -> None:
    move = ctypes.memmove
    for to, from_ in addresses:
        move(to, from_, block_bytes)


def check_same(contestants: dict[str, Callable[[], None]], target: np.ndarray) -> None:
    """Check that all contestants write the same bytes: a comparison of different work is none."""
    expected = None
    for name, run in contestants.items():
        target.fill(0)
        run()
        if expected is None:
            expected = target.copy()
        assert np.array_equal(target, expected), f"{name} writes other bytes than the first"


def print_ratios(case: str, seconds: dict[str, float]) -> None:
    """Print throughputs, and how much faster kvferry is than each of the others."""
    ferry = seconds["kvferry"]
    print_table(
        [case, "ms", "GB/s", "kvferry is faster by"],
        [
            [
                name,
                f"{each * 1e3:.1f}",
                f"{TOTAL_BYTES / each / 1e9:.1f}",
                "" if name == "kvferry" else f"{each / ferry:.2f}x",
            ]
            for name, each in seconds.items()
        ],
    )


def touched_memory() -> np.ndarray:
    """Pages that exist, so that no copy pays for their first touch, from a page's first byte on."""
    memory = np.ones(TOTAL_BYTES + PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES
    return memory[begin : begin + TOTAL_BYTES].view(np.uint16)


def shuffled(count: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count).astype(np.int64)


if __name__ == "__main__":
    main()
