"""Between pinned host memory and a GPU: large blocks, and fragments of any size by either way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _copies import block_loop, in_turn, permutation
from _events import STREAM, take_turns
from _rows import Row

from kvferry import copy, cuda

TOTAL_BYTES = 256 << 20
LARGE_BYTES = 1 << 20


def size(num_bytes: int) -> str:
    return f"{num_bytes} bytes" if num_bytes < 1 << 10 else f"{num_bytes >> 10:,} KiB"


def large_blocks(direction: str) -> Row:
    """Measure blocks that the copy engine takes, in any order on both sides."""
    count = TOTAL_BYTES // LARGE_BYTES
    host = torch.randint(256, (count, LARGE_BYTES), dtype=torch.uint8).pin_memory()
    device = torch.zeros_like(host, device="cuda")
    source, target = (host, device) if direction == "upload" else (device, host)

    def by_kvferry(seed):
        ids = [permutation(count, 2 * seed + side).numpy() for side in (0, 1)]
        stream = STREAM.cuda_stream
        return lambda: copy.copy_kv_blocks({"a": source}, {"a": target}, *ids, "h2d", stream=stream)

    loop, loop_bytes = block_loop(source, target, permutation(count, 1), permutation(count, 2))
    timings = take_turns(
        {
            "plain": lambda: target.copy_(source, non_blocking=True),
            "kvferry": in_turn(map(by_kvferry, range(7))),
            "loop": loop,
        },
        rounds=5,
    )
    return Row(
        f"{direction}, blocks of {size(LARGE_BYTES)}",
        plain=TOTAL_BYTES / timings["plain"].seconds,
        kvferry=TOTAL_BYTES / timings["kvferry"].seconds,
        loop=loop_bytes / timings["loop"].seconds,
        enqueue=timings["kvferry"].enqueue_seconds,
        goal="bus",
    )


def fragment_rows(direction: str, speeds: cuda.BusSpeeds, engine_from_bytes: int) -> list[Row]:
    """Return a row for each size; kvferry goes the way that the suggested threshold says."""
    return [
        Row(
            f"{direction}, fragments of {size(fragments.num_bytes)}",
            plain=speeds.plain,
            kvferry=(
                fragments.engine if fragments.num_bytes >= engine_from_bytes else fragments.kernel
            ),
            kernel=fragments.kernel,
            engine=fragments.engine,
        )
        for fragments in speeds.fragments
    ]


def rows(measured: cuda.Calibration) -> Iterator[Row]:
    yield large_blocks("upload")
    yield large_blocks("download")
    yield from fragment_rows("upload", measured.upload, measured.upload_bytes)
    yield from fragment_rows("download", measured.download, measured.download_bytes)
