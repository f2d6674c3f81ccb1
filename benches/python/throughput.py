"""Host copies by run length, beside `memcpy` and the machine's limit: a table and a plot.

512 MiB of whole blocks, in random order on both sides, are copied by `Plan.copy`, by one `memcpy`
a block, and in one contiguous piece by `memcpy` and by sequential streams past the caches, the best
of which is called the limit. All of them take turns in one run. Memory is in huge pages, as numpy's
arrays are, and then in pages of 4 KiB.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _measure import medians, print_heading, print_table
from _memory import (
    REPOSITORY,
    TOTAL_BYTES,
    limit,
    memcpy,
    memcpy_each,
    shuffled,
    streams,
    touched_memory,
)

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route

RUN_BYTES = [256 << step for step in range(9)]  # to 64 KiB
PLOT = REPOSITORY / "target/bench/throughput.svg"
HEAD_BYTES, PLANES = 256, 2
# What a rank of TP 8 holds of eight heads; key and value planes are apart.
MODEL = ModelSpec((AttentionGroup(layers=(0,), num_kv_heads=1, head_dim=HEAD_BYTES // 2),))


class Speeds(NamedTuple):
    """GB/s of one run length."""

    kvferry: float
    memcpy_each: float
    memcpy: float
    limit: float


class Setting(NamedTuple):
    """What is varied beside the run length."""

    pages: str
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each contestant")
    parser.add_argument("--rounds", type=int, default=9, help="of every contestant")
    parser.add_argument("--plot", type=Path, default=PLOT, help="SVG of GB/s against run length")
    options = parser.parse_args()
    note = f"{TOTAL_BYTES >> 20} MiB, medians of {options.rounds} interleaved rounds"
    print_heading("Copies by run length", note)
    results: dict[Setting, list[Speeds]] = {}
    for pages in ("2 MiB", "4 KiB"):
        source, target = (touched_memory(huge_pages=pages == "2 MiB") for _ in range(2))
        for run_bytes, threads in product(RUN_BYTES, options.threads):
            speeds = measure(source, target, run_bytes, threads, options.rounds)
            results.setdefault(Setting(pages, threads), []).append(speeds)
    for setting, speeds in results.items():
        print_speeds(setting, speeds)
    plot(results, options.plot)


def measure(
    source: np.ndarray, target: np.ndarray, run_bytes: int, threads: int, rounds: int
) -> Speeds:
    tokens_per_block = run_bytes // HEAD_BYTES
    engines = [EngineSpec(side, MODEL, tokens_per_block, "KBNHD") for side in ("from", "to")]
    tensors = [
        memory.reshape(PLANES, -1, tokens_per_block, 1, HEAD_BYTES // 2)
        for memory in (source, target)
    ]
    blocks = tensors[0].shape[1]
    ids = [shuffled(blocks, seed=seed) for seed in (1, 2)]
    plan = Route(*engines).plan(0, [ids[0]], [ids[1]], tokens=(0, blocks * tokens_per_block))
    assert plan.num_bytes == TOTAL_BYTES
    caches = [KVCache(engine, 0, [t]) for engine, t in zip(engines, tensors, strict=True)]
    # One plane after the other, in the order of target addresses, which is the best for `memcpy`.
    order = np.argsort(ids[1])
    from_, to = (
        np.concatenate(
            [m.ctypes.data + (each[order] + p * blocks) * run_bytes for p in range(PLANES)]
        )
        for m, each in zip((source, target), ids, strict=True)
    )
    seconds = medians(
        {
            "kvferry": lambda: plan.copy(*caches, threads=threads),
            "each": memcpy_each(to, from_, run_bytes, threads),
            "memcpy": memcpy(target, source, threads),
            **streams(target, source, threads),
        },
        rounds=rounds,
    )
    taken = (seconds["kvferry"], seconds["each"], seconds["memcpy"], limit(seconds))
    return Speeds(*(TOTAL_BYTES / each / 1e9 for each in taken))


def print_speeds(setting: Setting, speeds: list[Speeds]) -> None:
    print_table(
        [
            f"{setting.threads} thread{'s'[: setting.threads - 1]}, pages of {setting.pages}",
            "kvferry, GB/s",
            "memcpy of each run",
            "memcpy, contiguous",
            "limit",
            "of memcpy",
            "of the limit",
        ],
        [
            [
                f"runs of {run_bytes:,} bytes",
                *(f"{speed:.1f}" for speed in each),
                f"{each.kvferry / each.memcpy:.2f}",
                f"{each.kvferry / each.limit:.2f}",
            ]
            for run_bytes, each in zip(RUN_BYTES, speeds, strict=True)
        ],
    )


def plot(results: dict[Setting, list[Speeds]], path: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError:
        print("No plot: matplotlib is not installed.\n")
        return
    mpl.use("svg")
    # The same figures give the same file.
    mpl.rcParams.update({"svg.hashsalt": "kvferry", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len({s.pages for s in results}),
        len({s.threads for s in results}),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(9, 7),
        layout="constrained",
    )
    for panel, (setting, speeds) in zip(panels.flat, results.items(), strict=True):
        columns = Speeds(*np.array(speeds).T)
        panel.plot(RUN_BYTES, columns.limit, "k--", label="limit: sequential, streamed")
        panel.plot(RUN_BYTES, columns.kvferry, "o-", label="kvferry, random order")
        panel.plot(RUN_BYTES, columns.memcpy, "-", color="gray", label="memcpy, sequential")
        panel.plot(RUN_BYTES, columns.memcpy_each, "s-", label="memcpy of each run, random order")
        panel.set_xscale("log", base=2)
        panel.set_xticks(RUN_BYTES, [sized(run_bytes) for run_bytes in RUN_BYTES])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.set_title(f"{setting.threads} thread(s), pages of {setting.pages}")
    for panel in panels[-1]:
        panel.set_xlabel("run length, bytes")
    for panel in panels[:, 0]:
        panel.set_ylabel("GB/s copied")
    panels.flat[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def sized(num_bytes: int) -> str:
    return f"{num_bytes >> 10}K" if num_bytes >= 1 << 10 else str(num_bytes)


if __name__ == "__main__":
    main()
