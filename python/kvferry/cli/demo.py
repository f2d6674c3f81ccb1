"""The main job, end to end: one request between two engines that agree on nothing, verified."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry import EngineSpec, KVCache, ModelSpec, Route
from kvferry._words import counted
from kvferry.cli.memcpy import MemcpyTimer
from kvferry.cli.scale import (
    GIB,
    blocks_needed,
    blocks_of,
    cache_bytes,
    engines,
    fit,
    tensor_bytes,
)
from kvferry.testing import Mismatch, check_reference, fill_reference, poison

# Each rank is copied until so many bytes have moved, at least three times; the median counts.
TIMED_BYTES = 1 << 30
# Of every processor in use.
LINE_BYTES = 64
COLUMNS = ("rank", "reads", "MiB", "fragments", "least", "plan", "copy", "of memcpy", "bytes")

T = TypeVar("T")
Tensors = list[npt.NDArray[np.generic]]
Blocks = list[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Side:
    """One engine with its memory and the request's block table."""

    engine: EngineSpec
    tensors: list[Tensors]  # a rank, in slot order
    caches: list[KVCache]  # a rank
    blocks: Blocks  # a group


@dataclass(frozen=True)
class Moved:
    """What one target rank's plan was, and how fast it ran."""

    source_ranks: tuple[int, ...]
    notify_only: tuple[int, ...]
    num_bytes: int
    num_fragments: int
    min_bytes: int
    plan_seconds: float
    copy_seconds: float
    memcpy_seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0, or 1 where a byte differs from what the reference says."""
    console = Console()
    whole = ModelSpec.from_hf_config(arguments.model, dtype=arguments.dtype)
    model = fit(whole, arguments)
    route = Route(*engines(model, arguments))
    console.print(_setting(route, whole, model, arguments), highlight=False)

    rng = np.random.default_rng(arguments.seed)
    source = allocate(route.source, arguments.tokens, rng)
    target = allocate(route.target, arguments.tokens, rng)
    with _progress() as progress:
        filled = tensor_bytes(source.engine, arguments.tokens, blocks_needed)
        tick = _bar(progress, "fill source", filled)
        for rank, tensors in enumerate(source.tensors):
            fill_reference(source.engine, rank, tensors, source.blocks, progress=tick)
        tick = _bar(progress, "poison target", nbytes(target.tensors))
        for tensors in target.tensors:
            poison(tensors)
            tick(nbytes([tensors]))

    moved = [move(route, source, target, rank, arguments) for rank in range(route.target.num_ranks)]
    with _progress() as progress:
        tick = _bar(progress, "verify target", nbytes(target.tensors))
        mismatches = [
            check_reference(
                source.engine,
                target.engine,
                rank,
                tensors,
                None,  # every other byte is still poison
                source.blocks,
                target.blocks,
                (0, arguments.tokens),
                progress=tick,
            )
            for rank, tensors in enumerate(target.tensors)
        ]

    console.print(_table(moved, mismatches, arguments.threads))
    wrong = next((mismatch for mismatch in mismatches if mismatch is not None), None)
    if wrong is not None:
        console.print(f"first wrong element: {wrong}", style="red", highlight=False)
        return 1
    console.print(
        f"verified all {nbytes(target.tensors):,} bytes of the target: "
        "what was due has arrived, the rest is untouched",
        highlight=False,
    )
    return 0


def allocate(engine: EngineSpec, tokens: int, rng: np.random.Generator) -> Side:
    """Allocate every rank's tensors, and scatter the request's blocks over them."""
    tensors = [rank_tensors(engine, rank, tokens) for rank in range(engine.num_ranks)]
    caches = [KVCache(engine, rank, arrays) for rank, arrays in enumerate(tensors)]
    blocks = [
        rng.permutation(blocks_of(engine, group, tokens))[: blocks_needed(engine, group, tokens)]
        for group in range(len(engine.model.groups))
    ]
    return Side(engine, tensors, caches, blocks)


def rank_tensors(engine: EngineSpec, rank: int, tokens: int) -> Tensors:
    """Allocate one rank's tensors as engines do: at cache lines, in as much memory as they need.

    numpy's own arrays of this size begin 16 bytes behind one, and are in huge pages only in part.
    """
    slots = engine.tensor_slots(rank)
    shapes = [slot.shape(blocks_of(engine, slot.group, tokens)) for slot in slots]
    sizes = [math.prod(shape) * slot.item_bytes for shape, slot in zip(shapes, slots, strict=True)]
    *begins, end = accumulate((-(-size // LINE_BYTES) * LINE_BYTES for size in sizes), initial=0)
    memory = np.empty(end + LINE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % LINE_BYTES :]
    return [
        memory[begin : begin + size].view(f"u{slot.item_bytes}").reshape(shape)
        for begin, size, shape, slot in zip(begins, sizes, shapes, slots, strict=True)
    ]


def move(
    route: Route, source: Side, target: Side, rank: int, arguments: argparse.Namespace
) -> Moved:
    """Plan and copy what one target rank needs, beside a memcpy of as many bytes."""
    request = (rank, source.blocks, target.blocks, (0, arguments.tokens))
    plan_seconds, plan = _timed(lambda: route.plan(*request))
    explained = plan.explain(source.caches, target.caches)
    memcpy = MemcpyTimer(plan.num_bytes)
    copies, memcpies = [], []
    for _ in range(max(3, min(100, TIMED_BYTES // max(1, plan.num_bytes)))):
        seconds, _none = _timed(
            lambda: plan.copy(source.caches, target.caches[rank], threads=arguments.threads)
        )
        copies.append(seconds)
        memcpies.append(memcpy.seconds())
    return Moved(
        source_ranks=plan.source_ranks,
        notify_only=plan.notify_only,
        num_bytes=plan.num_bytes,
        num_fragments=explained.num_fragments,
        min_bytes=min((pair.min_bytes for pair in explained.pairs), default=0),
        plan_seconds=plan_seconds,
        copy_seconds=statistics.median(copies),
        memcpy_seconds=statistics.median(memcpies),
    )


def nbytes(tensors: Sequence[Tensors]) -> int:
    """Return the bytes of all ranks' tensors."""
    return sum(tensor.nbytes for rank in tensors for tensor in rank)


def _timed(job: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = job()
    return time.perf_counter() - begin, result


def _setting(
    route: Route, whole: ModelSpec, model: ModelSpec, arguments: argparse.Namespace
) -> str:
    layers, kept = (sum(len(group.layers) for group in spec.groups) for spec in (whole, model))
    cut = (
        "" if kept == layers else f" of {layers}, so that caches stay under {arguments.max_gib} GiB"
    )
    held, asked = counted(kept, "layer"), counted(arguments.tokens, "token")
    lines = [f"{arguments.model.stem}: {held}{cut}; {asked}"]
    lines += [
        f"  {engine.engine_id}: tp={engine.tp_size}, {engine.tokens_per_block} tokens a block, "
        + ", ".join(dict.fromkeys(slot.layout for slot in engine.tensor_slots(rank=0)))
        for engine in (route.source, route.target)
    ]
    lines.append(f"  {cache_bytes(model, arguments) / GIB:.2f} GiB of caches in both engines")
    return "\n".join(lines)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _bar(progress: Progress, description: str, total_bytes: int) -> Callable[[int], None]:
    """Add a bar over so many bytes; return what moves it on by some."""
    task = progress.add_task(description.ljust(len("poison target")), total=total_bytes)
    return lambda num_bytes: progress.advance(task, num_bytes)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks for people; many in a row as their ends."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "-"


def _table(moved: Sequence[Moved], mismatches: Sequence[Mismatch | None], threads: int) -> Table:
    by = "one thread" if threads == 1 else f"at most {threads} threads"
    table = Table(
        title=f"what each target rank reads, copied by {by}",
        box=box.SIMPLE_HEAD,
    )
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.padding = (0, 0)  # fits 80 columns whatever the numbers
    for rank, (row, mismatch) in enumerate(zip(moved, mismatches, strict=True)):
        table.add_row(
            str(rank),
            _ranks(row.source_ranks),
            f"{row.num_bytes / 2**20:,.0f}",
            f"{row.num_fragments:,}",
            f"{row.min_bytes} B",
            f"{row.plan_seconds * 1e3:.2f} ms",
            f"{row.num_bytes / row.copy_seconds / 1e9:.1f} GB/s",
            f"{row.memcpy_seconds / row.copy_seconds:.2f}" if row.num_bytes else "-",
            "exact" if mismatch is None else "WRONG",
        )
    return table
