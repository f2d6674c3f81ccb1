"""Small copies: one request of 256 KiB beside numpy and torch, and what a call costs by itself.

A call's overhead is its time with one block of 512 bytes. Threads are left to kvferry, which uses
the caller's alone for so little.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from _measure import medians, print_heading, print_table
from _memory import shuffled

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Plan, Route
from kvferry.copy import copy_blocks, copy_kv_blocks

REQUEST_BYTES = 256 << 10
POOL_BYTES = 64 << 20  # of either side, so that a request's blocks lie apart
CALLS = 200  # timed together: one takes microseconds
PLANES, HEAD_DIM = 2, 128  # elements of two bytes

Contestants = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="of every contestant")
    rounds = parser.parse_args().rounds
    print_heading("Small copies", f"Medians of {rounds} interleaved rounds of {CALLS} calls")
    requests = {blocks: microseconds(contestants(blocks), rounds) for blocks in (4, 16, 64)}
    print_table(
        ["256 KiB, microseconds", *(f"{blocks} blocks" for blocks in requests)],
        [
            [name, *(f"{taken[name]:.1f}" for taken in requests.values())]
            for name in next(iter(requests.values()))
        ],
    )
    overheads = microseconds(calls(), rounds)
    print_table(
        ["one block of 512 bytes", "microseconds a call"],
        [[name, f"{taken:.1f}"] for name, taken in overheads.items()],
    )


def contestants(blocks: int) -> Contestants:
    """Return copies of so many blocks, 256 KiB in all, from anywhere to anywhere in two pools."""
    pools = [np.ones((POOL_BYTES * blocks // REQUEST_BYTES, REQUEST_BYTES // blocks // 2), "i2")]
    pools.append(np.zeros_like(pools[0]))
    source, target = pools
    from_, to = (shuffled(len(source), seed=seed)[:blocks] for seed in (1, 2))
    pairs = list(zip(from_.tolist(), to.tolist(), strict=True))
    tensors = [torch.from_numpy(pool) for pool in pools]
    torch_from, torch_to = torch.from_numpy(from_), torch.from_numpy(to)
    whole = slice(0, blocks)

    def numpy_slices() -> None:
        for s, t in pairs:
            target[t] = source[s]

    def numpy_at_once() -> None:
        target[to] = source[from_]

    def numpy_contiguous() -> None:
        target[whole] = source[whole]

    def torch_slices() -> None:
        for s, t in pairs:
            tensors[1][t].copy_(tensors[0][s])

    return {
        **kvferry(pools, from_, to),
        "numpy, slice by slice": numpy_slices,
        "numpy, Y[di] = X[si]": numpy_at_once,
        "numpy, one contiguous slice": numpy_contiguous,
        "torch, slice by slice": torch_slices,
        "torch, two steps": lambda: tensors[1].index_copy_(
            0, torch_to, tensors[0].index_select(0, torch_from)
        ),
    }


def calls() -> Contestants:
    pools = [np.ones((1024, PLANES * HEAD_DIM), "i2"), np.zeros((1024, PLANES * HEAD_DIM), "i2")]
    ids = np.array([3]), np.array([5])
    return {**kvferry(pools, *ids), "one slice, numpy": lambda: np.copyto(pools[1][5], pools[0][3])}


def kvferry(pools: list[np.ndarray], from_: np.ndarray, to: np.ndarray) -> Contestants:
    """Return every way to have kvferry copy the same rows of two pools."""
    tokens = pools[0].shape[1] // (PLANES * HEAD_DIM)
    model = ModelSpec((AttentionGroup((0,), num_kv_heads=1, head_dim=HEAD_DIM),))
    arrays = [pool.reshape(-1, PLANES, tokens, 1, HEAD_DIM) for pool in pools]
    tensors = [torch.from_numpy(array) for array in arrays]
    engines = [EngineSpec(side, model, tokens, "BKNHD") for side in ("prefill", "decode")]
    caches = [KVCache(e, 0, [array]) for e, array in zip(engines, arrays, strict=True)]
    route = Route(*engines)

    def make_plan() -> Plan:
        return route.plan(0, [from_], [to], tokens=(0, tokens * len(from_)))

    plan = make_plan()
    layouts = {"source_layout": "BKNHD", "target_layout": "BKNHD"}
    sources, targets = ({"layer": tensor} for tensor in tensors)
    return {
        "Plan.copy, bound caches": lambda: plan.copy(*caches),
        "Route.plan and Plan.copy": lambda: make_plan().copy(*caches),
        "copy_blocks, numpy": lambda: copy_blocks(*arrays, from_, to, **layouts),
        "copy_blocks, torch": lambda: copy_blocks(*tensors, from_, to, **layouts),
        "copy_kv_blocks, torch": lambda: copy_kv_blocks(sources, targets, from_, to, "h2d"),
    }


def microseconds(contestants: Contestants, rounds: int) -> dict[str, float]:
    def repeated(run: Callable[[], object]) -> Callable[[], None]:
        def run_all() -> None:
            for _ in range(CALLS):
                run()

        return run_all

    seconds = medians({name: repeated(run) for name, run in contestants.items()}, rounds=rounds)
    return {name: taken / CALLS * 1e6 for name, taken in seconds.items()}


if __name__ == "__main__":
    main()
