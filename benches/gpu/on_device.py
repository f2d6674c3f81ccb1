"""Between two memories of one GPU: gather, scatter, re-layout and whole plans.

Each is beside `copy_` of as many contiguous bytes, a plain device copy, and what torch has for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _copies import block_loop, in_turn, permutation
from _events import STREAM, Timing, take_turns
from _rows import Row

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, copy

TOTAL_BYTES = 1 << 30
BLOCK_BYTES = tuple(size << 10 for size in (4, 16, 64, 256, 1024))
TYPE = torch.bfloat16
# Heads of 256 bytes, blocks of 64 KiB.
TOKENS, HEADS, DIM = 16, 8, 128
# Ids that differ from one round to the next, so that each has tables of its own to upload.
ID_LISTS = 11
LEAST_BLOCKS = 256
# (layers, tokens of the request)
REQUESTS = ((2, 64), (32, 4096), (80, 4096))


def filled(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=TYPE, device="cuda").normal_()


def row(what: str, num_bytes: int, timings: dict[str, Timing], **more: object) -> Row:
    speeds = {name: num_bytes / timing.seconds for name, timing in timings.items()}
    enqueue = timings["kvferry"].enqueue_seconds
    return Row(what=what, enqueue=enqueue, **{**speeds, **more})


def blocks(kind: str, block_bytes: int) -> Row:
    """Measure blocks that lie in any order on one side, or on both."""
    count = TOTAL_BYTES // block_bytes
    source, target = (filled(count, block_bytes // TYPE.itemsize) for _ in range(2))
    straight = torch.arange(count)
    id_lists = [
        (
            straight if kind == "scatter" else permutation(count, 2 * seed),
            straight if kind == "gather" else permutation(count, 2 * seed + 1),
        )
        for seed in range(ID_LISTS)
    ]
    from_ids, to_ids = (ids.cuda() for ids in id_lists[0])

    def by_kvferry(ids):
        arrays, stream = [i.numpy() for i in ids], STREAM.cuda_stream
        return lambda: copy.copy_kv_blocks(
            {"a": source}, {"a": target}, *arrays, "h2d", stream=stream
        )

    def by_index():
        if kind == "gather":
            torch.index_select(source, 0, from_ids, out=target)
        elif kind == "scatter":
            target.index_copy_(0, to_ids, source)
        else:
            target.index_copy_(0, to_ids, source.index_select(0, from_ids))

    loop, loop_bytes = block_loop(source, target, *id_lists[0])
    timings = take_turns(
        {
            "plain": lambda: target.copy_(source),
            "kvferry": in_turn(map(by_kvferry, id_lists)),
            "torch": by_index,
        }
    )
    return row(
        f"{kind}, blocks of {block_bytes >> 10:,} KiB",
        TOTAL_BYTES,
        timings,
        loop=loop_bytes / take_turns({"loop": loop}, rounds=3)["loop"].seconds,
        goal="device" if block_bytes == 64 << 10 else "",
    )


def relayout(source_layout: str, target_layout: str) -> Row:
    """Measure blocks that change the order of tokens and heads."""
    count = TOTAL_BYTES // (2 * TOKENS * HEADS * DIM * TYPE.itemsize)
    sizes = {"K": 2, "B": count, "N": TOKENS, "H": HEADS, "D": DIM}
    source, target = (
        filled(*(sizes[axis] for axis in layout)) for layout in (source_layout, target_layout)
    )
    id_lists = [
        [permutation(count, 2 * seed + side) for side in (0, 1)] for seed in range(ID_LISTS)
    ]
    from_ids, to_ids = (ids.cuda() for ids in id_lists[0])
    order = [source_layout.index(axis) for axis in target_layout]
    source_axis, target_axis = source_layout.index("B"), target_layout.index("B")
    layouts = {"source_layout": source_layout, "target_layout": target_layout}

    def by_kvferry(ids):
        arrays, stream = [i.numpy() for i in ids], STREAM.cuda_stream
        return lambda: copy.copy_blocks(source, target, *arrays, **layouts, stream=stream)

    def permuted():
        picked = source.index_select(source_axis, from_ids).permute(order)
        target.index_copy_(target_axis, to_ids, picked)

    flat = source.view(-1), target.view(-1)
    timings = take_turns(
        {
            "plain": lambda: flat[1].copy_(flat[0]),
            "kvferry": in_turn(map(by_kvferry, id_lists)),
            "torch": permuted,
        }
    )
    what = f"{source_layout} to {target_layout}, heads of {DIM * TYPE.itemsize} bytes"
    return row(what, TOTAL_BYTES, timings, goal="relayout")


def requests(layers: int, tokens: int) -> list[Row]:
    """Measure whole plans, from 16 to 64 tokens a block: new ones, and the same again."""
    model = ModelSpec((AttentionGroup(range(layers), num_kv_heads=HEADS, head_dim=DIM),))
    ends = EngineSpec("source", model, 16, "KBNHD"), EngineSpec("target", model, 64, "KBHND")
    counts = tokens // 16, tokens // 64
    # So many blocks that no two of the plans have the same ones.
    held = [max(count, LEAST_BLOCKS) for count in counts]
    tensors = [
        [filled(*slot.shape(blocks)) for slot in engine.tensor_slots(0)]
        for engine, blocks in zip(ends, held, strict=True)
    ]
    caches = [KVCache(engine, 0, own) for engine, own in zip(ends, tensors, strict=True)]
    route, stream, rounds = Route(*ends), STREAM.cuda_stream, 29

    def call(seed):
        picked = (permutation(blocks, 2 * seed + side) for side, blocks in enumerate(held))
        ids = [[some[:count].tolist()] for some, count in zip(picked, counts, strict=True)]
        plan = route.plan(0, *ids, tokens=(0, tokens))
        return lambda: plan.copy(*caches, stream=stream)

    num_bytes = layers * 2 * tokens * HEADS * DIM * TYPE.itemsize  # keys and values
    one, two = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    what = f"plan of {layers} layers, {tokens:,} tokens"
    rows = []
    for which, calls in (("", map(call, range(rounds + 2))), (", the same again", [call(99)])):
        contestants = {"plain": lambda: two.copy_(one), "kvferry": in_turn(calls)}
        timings = take_turns(contestants, rounds=rounds)
        rows.append(row(what + which, num_bytes, timings, goal="" if which else "overhead"))
    return rows


def rows() -> Iterator[Row]:
    for kind in ("gather", "scatter", "both"):
        for size in BLOCK_BYTES:
            yield blocks(kind, size)
    yield relayout("KBNHD", "KBHND")
    yield relayout("BNHKD", "KBHND")
    for layers, tokens in REQUESTS:
        yield from requests(layers, tokens)
