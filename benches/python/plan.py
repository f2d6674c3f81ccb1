"""Time and memory of `Route.plan`: a plan costs O(blocks), whatever the layers, heads and tensors.

The geometry is Llama 3.1 70B's, from 8 TP ranks with 16 tokens a block to 4 with 64. Block ids are
shuffled on both sides. Memory is what a thousand plans (fewer of long requests) add to the
process, since neither tracemalloc nor Python sees what Rust allocates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _measure import medians, print_heading, print_table

from kvferry import AttentionGroup, EngineSpec, ModelSpec, Plan, Route

SOURCE_TOKENS_PER_BLOCK = 16
TARGET_TOKENS_PER_BLOCK = 64
ROUNDS = 51
# Either form in which a caller may hold the block ids of a group.
Ids = list[int] | np.ndarray
# Blocks of all plans that are held at once: enough for whole pages to count, some 100 MB.
HELD_BLOCKS = 2_048_000


def main() -> None:
    rows = []
    for layers, tokens in [(80, 2_048), (80, 32_768), (1, 32_768), (80, 1 << 20)]:
        route = make_route(layers)
        sources = shuffled(tokens // SOURCE_TOKENS_PER_BLOCK, seed=1)
        targets = shuffled(tokens // TARGET_TOKENS_PER_BLOCK, seed=2)
        from_lists = planner(route, [sources.tolist()], [targets.tolist()], tokens)
        from_arrays = planner(route, [sources], [targets], tokens)
        seconds = medians({"lists": from_lists, "arrays": from_arrays}, rounds=ROUNDS)
        held = max(10, min(1000, HELD_BLOCKS // len(sources)))
        plan_bytes = resident_bytes(from_arrays, count=held)
        rows.append(
            [
                f"{layers} layers, {tokens:,} tokens",
                f"{len(sources):,} + {len(targets):,}",
                f"{seconds['lists'] * 1e3:.3f}",
                f"{seconds['arrays'] * 1e3:.3f}",
                f"{plan_bytes / 1e3:,.1f}",
                f"{plan_bytes / (len(sources) + len(targets)):.1f}",
            ]
        )
    print_heading("Plans", f"One of 4 target ranks, TP 8 to 4, medians of {ROUNDS} rounds")
    print_table(["", "blocks", "lists, ms", "numpy, ms", "plan, kB", "bytes a block"], rows)


def make_route(layers: int) -> Route:
    model = ModelSpec((AttentionGroup(layers=tuple(range(layers)), num_kv_heads=8, head_dim=128),))
    source = EngineSpec("prefill", model, SOURCE_TOKENS_PER_BLOCK, "HND", tp_size=8)
    target = EngineSpec("decode", model, TARGET_TOKENS_PER_BLOCK, "NHD", tp_size=4)
    return Route(source, target)


def shuffled(count: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count).astype(np.int64)


def planner(
    route: Route, source_blocks: list[Ids], target_blocks: list[Ids], tokens: int
) -> Callable[[], Plan]:
    return lambda: route.plan(0, source_blocks, target_blocks, tokens=(0, tokens))


def resident_bytes(make: Callable[[], Plan], *, count: int) -> float:
    """Bytes by which one plan makes the process grow, averaged over `count` that are held."""
    _reused = [make() for _ in range(count // 10)]  # fills what earlier plans have left free
    before = own_resident_bytes()
    held = [make() for _ in range(count)]
    return (own_resident_bytes() - before) / len(held)


def own_resident_bytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
