"""Host copies beside what people use today, torch and numpy, at equal numbers of threads.

512 MiB of blocks, in random order on both sides, are copied unchanged, and from one layout and
block size to another in runs of one head's 256 bytes. kvferry is `Plan.copy`, checks included; its
plan is made before. The others get the same ids:

- *two steps*: `index_select`, then `index_copy_`, in bfloat16 and through a view as int64; most of
  that is the first touch of fresh temporaries, which *kept* spares by keeping them;
- *Y[di] = X[si]*: the same in torch's indexing, in bfloat16;
- *numpy*: the same in numpy, as int64, on the one thread that it knows;
- *by block*: a loop of `Y[d].copy_(X[s])`, which for a change of layout is `permute().copy_()`;
- *permute, no ids*: one `Y.copy_(X.permute(...))` over all, a lesser job: as if all lay in order.

The limit is the best of sequential streams past the caches; `memcpy` is over contiguous bytes too.
All memory is touched before and, but for torch's temporaries, in huge pages.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads must not spin beside us

import torch
from _measure import medians, print_heading, print_table
from _memory import TOTAL_BYTES, limit, memcpy, shuffled, streams, touched_memory

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route

HEADS, HEAD_DIM, PLANES, ITEM_BYTES = 8, 128, 2, 2
TOKEN_BYTES = PLANES * HEADS * HEAD_DIM * ITEM_BYTES
TOKENS = TOTAL_BYTES // TOKEN_BYTES
MODEL = ModelSpec((AttentionGroup(layers=(0,), num_kv_heads=HEADS, head_dim=HEAD_DIM),))
BLOCK_TOKENS = (1, 4, 16)  # blocks of 4, 16 and 64 KiB

Contestants = dict[str, Callable[[], object]]
OTHERS = (
    "two steps, int64",
    "kept, int64",
    "two steps, bfloat16",
    "Y[di] = X[si]",
    "numpy",
    "by block",
    "permute, no ids",
)


class Side(NamedTuple):
    """A layout and its tokens a block."""

    layout: str
    tokens: int


RELAYOUTS = (
    (Side("NHD", 16), Side("HND", 16)),
    (Side("HND", 16), Side("NHD", 16)),
    (Side("NHD", 64), Side("HND", 64)),
    (Side("HND", 64), Side("NHD", 64)),
    (Side("HND", 16), Side("NHD", 64)),
    (Side("NHD", 64), Side("HND", 16)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each contestant")
    parser.add_argument("--rounds", type=int, default=5, help="of every contestant")
    options = parser.parse_args()
    source, target = touched_memory(), touched_memory()
    source[:] = np.random.default_rng(0).integers(0, 1 << 16, size=source.size, dtype=np.uint16)
    print_heading(
        "Copies beside torch and numpy",
        f"{TOTAL_BYTES >> 20} MiB, medians of {options.rounds} interleaved rounds; the right part "
        "says by what factor kvferry is faster",
    )
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        cases = [
            *(block_case(source, target, tokens, threads) for tokens in BLOCK_TOKENS),
            *(relayout_case(source, target, sides, threads) for sides in RELAYOUTS),
        ]
        for name, contestants in cases:
            check_same(contestants, target)
            limits = {"memcpy": memcpy(target, source, threads), **streams(target, source, threads)}
            seconds = medians({**contestants, **limits}, rounds=options.rounds)
            rows.append(line(name, threads, seconds))
    print_table(["", "threads", "GB/s", "of memcpy", "of the limit", *OTHERS], rows)


def line(name: str, threads: int, seconds: dict[str, float]) -> list[str]:
    ferry = seconds["kvferry"]
    return [
        name,
        str(threads),
        f"{TOTAL_BYTES / ferry / 1e9:.1f}",
        f"{seconds['memcpy'] / ferry:.2f}",
        f"{limit(seconds) / ferry:.2f}",
        *(f"{seconds[other] / ferry:.1f}x" if other in seconds else "" for other in OTHERS),
    ]


def block_case(
    source: np.ndarray, target: np.ndarray, tokens: int, threads: int
) -> tuple[str, Contestants]:
    """Whole blocks, the same layout on both sides."""
    tensors = [memory.reshape(-1, PLANES, tokens, HEADS, HEAD_DIM) for memory in (source, target)]
    ids = [shuffled(len(tensors[0]), seed=seed) for seed in (1, 2)]
    rows = [memory.view(np.int64).reshape(len(ids[0]), -1) for memory in (source, target)]
    wide = [torch.from_numpy(row) for row in rows]
    pairs = list(zip(*(each.tolist() for each in ids), strict=True))

    def by_numpy() -> None:
        rows[1][ids[1]] = rows[0][ids[0]]

    def by_block() -> None:
        for from_, to in pairs:
            wide[1][to].copy_(wide[0][from_])

    return f"blocks of {tokens * TOKEN_BYTES >> 10} KiB", {
        "kvferry": ferry([Side("BKNHD", tokens)] * 2, tensors, ids, threads),
        **in_two_steps(wide, ids, 0, None),
        **in_bfloat16(wide, ids),
        **({"numpy": by_numpy} if threads == 1 else {}),
        "by block": by_block,
    }


def relayout_case(
    source: np.ndarray, target: np.ndarray, sides: tuple[Side, Side], threads: int
) -> tuple[str, Contestants]:
    """Key and value planes of whole blocks, each laid out anew."""
    tensors = [
        memory.reshape(shape(side)) for memory, side in zip((source, target), sides, strict=True)
    ]
    ids = [shuffled(tensor.shape[1], seed=seed) for seed, tensor in enumerate(tensors)]
    wide = [torch.from_numpy(tensor.view(np.int64)) for tensor in tensors]
    small, large = sorted(side.tokens for side in sides)

    def by_part(tensor: torch.Tensor, side: Side) -> torch.Tensor:
        """View blocks as [planes, large blocks, small blocks, small tokens, heads, elements]."""
        if side.tokens == small:
            parts = tensor.unflatten(1, (-1, large // small))
            return parts.transpose(3, 4) if side.layout == "HND" else parts
        parts = tensor.unflatten(3 if side.layout == "HND" else 2, (-1, small))
        return parts.permute(0, 1, 3, 4, 2, 5) if side.layout == "HND" else parts

    def lay_out(gathered: torch.Tensor, laid_out: torch.Tensor) -> None:
        by_part(laid_out, sides[1]).copy_(by_part(gathered, sides[0]))

    def part_indices(side: Side, blocks: np.ndarray) -> list[tuple[int, int]]:
        """Where in `by_part` each small block of the request lies."""
        ratio = large // small
        if side.tokens == small:
            return [divmod(block, ratio) for block in blocks.tolist()]
        return [(block, part) for block in blocks.tolist() for part in range(ratio)]

    parts = [by_part(tensor, side) for tensor, side in zip(wide, sides, strict=True)]
    pairs = list(zip(*map(part_indices, sides, ids), strict=True))

    def by_block() -> None:
        for from_, to in pairs:
            parts[1][(slice(None), *to)].copy_(parts[0][(slice(None), *from_)])

    return " to ".join(f"{side.layout} {side.tokens}" for side in sides), {
        "kvferry": ferry(sides, tensors, ids, threads),
        **in_two_steps(wide, ids, 1, lay_out),
        "by block": by_block,
        "permute, no ids": lambda: parts[1].copy_(parts[0]),
    }


def shape(side: Side) -> tuple[int, ...]:
    inner = (side.tokens, HEADS) if side.layout == "NHD" else (HEADS, side.tokens)
    return (PLANES, -1, *inner, HEAD_DIM)


def ferry(
    sides: Sequence[Side], tensors: list[np.ndarray], ids: list[np.ndarray], threads: int
) -> Callable[[], object]:
    """Return kvferry's copy of a plan that is made here."""
    engines = [
        EngineSpec(name, MODEL, side.tokens, side.layout)
        for name, side in zip(("prefill", "decode"), sides, strict=True)
    ]
    plan = Route(*engines).plan(0, [ids[0]], [ids[1]], tokens=(0, TOKENS))
    assert plan.num_bytes == TOTAL_BYTES
    caches = [KVCache(engine, 0, [t]) for engine, t in zip(engines, tensors, strict=True)]
    return lambda: plan.copy(*caches, threads=threads)


def in_two_steps(
    wide: list[torch.Tensor],
    ids: list[np.ndarray],
    axis: int,
    lay_out: Callable[[torch.Tensor, torch.Tensor], None] | None,
) -> Contestants:
    """Gather along an axis into a temporary, lay that out in another one, scatter it."""
    source, target = wide
    from_, to = map(torch.from_numpy, ids)

    def run(gathered: torch.Tensor, laid_out: torch.Tensor) -> None:
        torch.index_select(source, axis, from_, out=gathered)
        if lay_out is not None:
            lay_out(gathered, laid_out)
        target.index_copy_(axis, to, gathered if lay_out is None else laid_out)

    kept = torch.ones_like(source), torch.ones_like(target)
    return {
        "two steps, int64": lambda: run(torch.empty_like(source), torch.empty_like(target)),
        "kept, int64": lambda: run(*kept),
    }


def in_bfloat16(wide: list[torch.Tensor], ids: list[np.ndarray]) -> Contestants:
    source, target = (tensor.view(torch.bfloat16) for tensor in wide)
    from_, to = map(torch.from_numpy, ids)

    def by_brackets() -> None:
        target[to] = source[from_]

    return {
        "two steps, bfloat16": lambda: target.index_copy_(0, to, source.index_select(0, from_)),
        "Y[di] = X[si]": by_brackets,
    }


def check_same(contestants: Contestants, target: np.ndarray) -> None:
    """Check that all with ids write the same bytes: a comparison of different work is none."""
    expected = None
    for name, run in contestants.items():
        if name.endswith("no ids"):
            continue
        target.fill(0)
        run()
        if expected is None:
            expected = target.copy()
        assert np.array_equal(target, expected), f"{name} writes other bytes than the first"


if __name__ == "__main__":
    main()
