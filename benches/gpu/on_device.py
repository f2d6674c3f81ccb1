"""Between two memories of one GPU: gather, scatter and re-layout, beside what torch has for them.

The last columns are speeds against `copy_` of as many contiguous bytes, a plain device copy.
"""

from __future__ import annotations

import statistics
import time

import torch
from _events import STREAM, device_seconds, permutation, print_table

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, copy

TOTAL_BYTES = 1 << 30
BLOCK_BYTES = tuple(size << 10 for size in (4, 16, 64, 256, 1024))
# A copy for each block takes microseconds of the host's time, so that few of them say enough.
LOOP_BLOCKS = 1024
TYPE = torch.bfloat16
# [planes, blocks, tokens, heads, dim]: heads of 256 bytes, blocks of 64 KiB.
TOKENS, HEADS, DIM = 16, 8, 128


def empty(*shape):
    return torch.empty(shape, dtype=TYPE, device="cuda").zero_()


def row(name, seconds, num_bytes, loop_seconds):
    plain = seconds["copy_"]
    return [
        name,
        f"{num_bytes / plain / 1e9:,.0f}",
        f"{num_bytes / seconds['kvferry'] / 1e9:,.0f}",
        f"{plain / seconds['kvferry']:.2f}",
        f"{plain / seconds['torch']:.2f}" if "torch" in seconds else "",
        f"{plain / loop_seconds:.3f}" if loop_seconds else "",
    ]


def blocks(kind, block_bytes):
    """Measure blocks that lie in any order on one side, or on both."""
    count = TOTAL_BYTES // block_bytes
    source, target = (empty(count, block_bytes // TYPE.itemsize) for _ in range(2))
    straight = torch.arange(count)
    from_ids = straight if kind == "scatter" else permutation(count, 1)
    to_ids = straight if kind == "gather" else permutation(count, 2)
    on_device = from_ids.cuda(), to_ids.cuda()
    pairs = list(zip(from_ids.tolist(), to_ids.tolist(), strict=True))[:LOOP_BLOCKS]
    ids, stream = (from_ids.numpy(), to_ids.numpy()), STREAM.cuda_stream

    def by_index():
        if kind == "gather":
            torch.index_select(source, 0, on_device[0], out=target)
        elif kind == "scatter":
            target.index_copy_(0, on_device[1], source)
        else:
            target.index_copy_(0, on_device[1], source.index_select(0, on_device[0]))

    def by_block():
        for from_id, to_id in pairs:
            target[to_id].copy_(source[from_id])

    seconds = device_seconds(
        {
            "copy_": lambda: target.copy_(source),
            "kvferry": lambda: copy.copy_kv_blocks(
                {"a": source}, {"a": target}, *ids, "h2d", stream=stream
            ),
            "torch": by_index,
        }
    )
    loop = device_seconds({"loop": by_block}, rounds=3)["loop"] * count / len(pairs)
    return row(f"{kind}, {block_bytes >> 10:,} KiB", seconds, TOTAL_BYTES, loop)


def relayout(source_layout, target_layout):
    """Measure blocks of 64 KiB that change the order of tokens and heads."""
    count = TOTAL_BYTES // (2 * TOKENS * HEADS * DIM * TYPE.itemsize)
    sizes = {"K": 2, "B": count, "N": TOKENS, "H": HEADS, "D": DIM}
    source, target = (
        empty(*(sizes[axis] for axis in layout)) for layout in (source_layout, target_layout)
    )
    ids = permutation(count, 1), permutation(count, 2)
    on_device = [i.cuda() for i in ids]
    order = [source_layout.index(axis) for axis in target_layout]
    source_axis, target_axis = source_layout.index("B"), target_layout.index("B")

    def permuted():
        picked = source.index_select(source_axis, on_device[0]).permute(order)
        target.index_copy_(target_axis, on_device[1], picked)

    layouts = {"source_layout": source_layout, "target_layout": target_layout}
    arrays = [i.numpy() for i in ids]
    flat = source.view(-1), target.view(-1)
    seconds = device_seconds(
        {
            "copy_": lambda: flat[1].copy_(flat[0]),
            "kvferry": lambda: copy.copy_blocks(
                source, target, *arrays, **layouts, stream=STREAM.cuda_stream
            ),
            "torch": permuted,
        }
    )
    return row(f"{source_layout} to {target_layout}", seconds, TOTAL_BYTES, None)


def engines(layers, tokens):
    """Return a plan between two engines, its caches, its bytes and the caches' tensors."""
    model = ModelSpec((AttentionGroup(range(layers), num_kv_heads=HEADS, head_dim=DIM),))
    ends = EngineSpec("source", model, 16, "KBNHD"), EngineSpec("target", model, 64, "KBHND")
    counts = tokens // 16, tokens // 64
    tensors = [
        [empty(*slot.shape(count)) for slot in engine.tensor_slots(0)]
        for engine, count in zip(ends, counts, strict=True)
    ]
    caches = [KVCache(engine, 0, own) for engine, own in zip(ends, tensors, strict=True)]
    route = Route(*ends)

    def plan(seed):
        ids = [[permutation(count, seed + side).tolist()] for side, count in enumerate(counts)]
        return route.plan(0, *ids, tokens=(0, tokens))

    return plan, caches


def whole_plan():
    plan, caches = engines(layers=32, tokens=8192)
    request = plan(1)
    one, two = (torch.empty(request.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = device_seconds(
        {
            "copy_": lambda: two.copy_(one),
            "kvferry": lambda: request.copy(*caches, stream=STREAM.cuda_stream),
        }
    )
    return row("plan, 16 to 64 tokens a block", seconds, request.num_bytes, None)


def microseconds_of_the_host(calls):
    """Return the median time that a call needs to enqueue its work."""
    taken = []
    for call in calls:
        STREAM.synchronize()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    STREAM.synchronize()
    return statistics.median(taken) * 1e6


def overhead(layers, tokens):
    plan, caches = engines(layers, tokens)
    again, stream = plan(1), STREAM.cuda_stream
    again.copy(*caches, stream=stream)
    others = [plan(seed) for seed in range(10, 50)]
    repeated = microseconds_of_the_host([lambda: again.copy(*caches, stream=stream)] * 100)
    new = microseconds_of_the_host(
        [lambda plan=plan: plan.copy(*caches, stream=stream) for plan in others]
    )
    return [f"{layers} layers, {tokens:,} tokens", f"{new:.1f}", f"{repeated:.1f}"]


def main():
    header = ["on the device, 1 GiB", "copy_ GB/s", "kvferry GB/s", "of copy_", "torch", "loop"]
    rows = [blocks(kind, size) for kind in ("gather", "scatter", "both") for size in BLOCK_BYTES]
    rows += [relayout("KBNHD", "KBHND"), relayout("BNHKD", "KBHND"), whole_plan()]
    print_table(header, rows)
    header = ["µs of the host to enqueue a plan", "new blocks", "the same again"]
    print_table(header, [overhead(1, 64), overhead(32, 4096), overhead(80, 4096)])


if __name__ == "__main__":
    main()
