"""Descriptors of one rank pair beside numpy and a plain loop that do the same job.

The geometry is Llama 3.1 70B's: 80 layers, TP 8 to 4, 32,768 tokens in shuffled blocks. All are
checked to give the same rows. "numpy" serves tensors of any strides, as kvferry does; "one layer"
knows that all layers are alike and repeats one's offsets, which is little more than writing the
columns. The plain loop is timed on one layer and scaled to all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from _measure import medians, print_heading, print_table

from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route

LAYERS, HEADS, HEAD_BYTES, TOKENS = 80, 8, 256, 32_768
SOURCE_TP, TARGET_TP, SOURCE_BLOCK = 8, 4, 16
SOURCE_RANK, TARGET_RANK = 3, 1
ROUNDS = 11
CASES = (("KBHND", 16), ("KBNHD", 64))
COLUMNS = ("source_tensor", "source_offset", "target_tensor", "target_offset", "length")


def main() -> None:
    rows = [measure(layout, target_block) for layout, target_block in CASES]
    print_heading("Descriptors", f"One rank pair, one thread, medians of {ROUNDS} rounds")
    header = ["", "rows", "ms", "M rows/s", "numpy", "one layer", "loop", "loops", "loops, ms"]
    print_table(header, rows)
    print_table(["route.plan, 1M tokens, 16 a block, 3 groups, arrays", "ms"], [plan_of_three()])


def measure(layout: str, target_block: int) -> list[str]:
    model = ModelSpec((AttentionGroup(tuple(range(LAYERS)), HEADS, HEAD_BYTES // 2),))
    source = EngineSpec("prefill", model, SOURCE_BLOCK, layout, tp_size=SOURCE_TP)
    target = EngineSpec("decode", model, target_block, layout, tp_size=TARGET_TP)
    rng = np.random.default_rng(0)
    source_ids = rng.permutation(TOKENS // SOURCE_BLOCK)
    target_ids = rng.permutation(TOKENS // target_block)
    plan = Route(source, target).plan(TARGET_RANK, [source_ids], [target_ids], tokens=(0, TOKENS))
    ends = (
        register(source, SOURCE_RANK, len(source_ids)),
        register(target, TARGET_RANK, len(target_ids)),
    )
    geometry = Geometry(layout, source_ids, target_ids, target_block)
    contestants: dict[str, Callable[[], object]] = {
        "kvferry": lambda: plan.descriptors(*ends),
        "numpy": geometry.with_numpy,
        "numpy, one layer": geometry.with_one_layer,
        "loop": lambda: geometry.with_loop(layers=1),
        "loops": lambda: plan.loops(*ends),
    }
    descriptors = plan.descriptors(*ends)
    ours = np.stack([getattr(descriptors, column) for column in COLUMNS])
    np.testing.assert_array_equal(ours, np.stack(geometry.with_numpy()))
    np.testing.assert_array_equal(ours, np.stack(geometry.with_one_layer()))
    one_layer = ours[:, ours[2] == 0]
    np.testing.assert_array_equal(one_layer, np.array(geometry.with_loop(layers=1)).T)
    seconds = medians(contestants, rounds=ROUNDS)
    return [
        f"{layout}, {SOURCE_BLOCK} to {target_block} tokens a block",
        f"{len(descriptors):,}",
        f"{seconds['kvferry'] * 1e3:.1f}",
        f"{len(descriptors) / seconds['kvferry'] / 1e6:.0f}",
        f"{seconds['numpy'] / seconds['kvferry']:.1f}x",
        f"{seconds['numpy, one layer'] / seconds['kvferry']:.1f}x",
        f"{seconds['loop'] * LAYERS / seconds['kvferry']:.0f}x",
        f"{len(plan.loops(*ends)):,}",
        f"{seconds['loops'] * 1e3:.2f}",
    ]


class Geometry:
    """The offsets of this one case, worked out by hand as a connector's author would."""

    def __init__(
        self, layout: str, source_ids: np.ndarray, target_ids: np.ndarray, target_block: int
    ) -> None:
        self.is_head_major = layout == "KBHND"
        self.source_ids, self.target_ids, self.target_block = source_ids, target_ids, target_block
        # Source ranks hold one head each, target ranks two; this pair shares the target's second.
        self.head = SOURCE_RANK * HEADS // SOURCE_TP - TARGET_RANK * HEADS // TARGET_TP
        self.target_heads = HEADS // TARGET_TP
        self.run_bytes = SOURCE_BLOCK * HEAD_BYTES if self.is_head_major else HEAD_BYTES

    def starts(self, plane: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target offsets of the runs of one layer and plane, [blocks, runs]."""
        source_bytes = SOURCE_BLOCK * HEAD_BYTES
        target_bytes = self.target_block * self.target_heads * HEAD_BYTES
        first = np.arange(0, TOKENS, SOURCE_BLOCK)
        source = self.source_ids * source_bytes + plane * len(self.source_ids) * source_bytes
        target = self.target_ids[first // self.target_block] * target_bytes
        target = target + plane * len(self.target_ids) * target_bytes
        if self.is_head_major:
            head_bytes = self.target_block * HEAD_BYTES
            return source[:, None], (target + self.head * head_bytes)[:, None]
        token = np.arange(SOURCE_BLOCK)
        step = self.target_heads * HEAD_BYTES
        target = target + first % self.target_block * step + self.head * HEAD_BYTES
        return source[:, None] + token * HEAD_BYTES, target[:, None] + token * step

    def with_numpy(self) -> list[np.ndarray]:
        """All columns, sorted by target: what holds for tensors of any strides."""
        source, target = (
            np.concatenate(both, axis=None)
            for both in zip(self.starts(0), self.starts(1), strict=True)
        )
        layer = np.repeat(np.arange(LAYERS), len(source))
        # Each layer's tensors may be strided otherwise, so every layer has offsets of its own.
        source, target = (np.tile(offsets, (LAYERS, 1)) for offsets in (source, target))
        order = np.argsort(target, axis=1, kind="stable")
        source, target = (np.take_along_axis(each, order, axis=1) for each in (source, target))
        length = np.full(len(layer), self.run_bytes)
        return [layer, source.ravel(), layer.copy(), target.ravel(), length]

    def with_one_layer(self) -> list[np.ndarray]:
        """All columns, where it is known that all layers are alike: one's, repeated."""
        planes = zip(self.starts(0), self.starts(1), strict=True)
        source, target = (np.concatenate(both, axis=None) for both in planes)
        order = np.argsort(target, kind="stable")
        count = len(order)
        layer = np.repeat(np.arange(LAYERS), count)
        length = np.full(LAYERS * count, self.run_bytes)
        return [
            layer,
            np.tile(source[order], LAYERS),
            layer.copy(),
            np.tile(target[order], LAYERS),
            length,
        ]

    def with_loop(self, *, layers: int) -> list[tuple[int, int, int, int, int]]:
        """Rows as a plain loop over layers, planes, blocks and tokens makes them."""
        rows = []
        source_bytes = SOURCE_BLOCK * HEAD_BYTES
        target_bytes = self.target_block * self.target_heads * HEAD_BYTES
        planes = len(self.source_ids) * source_bytes, len(self.target_ids) * target_bytes
        tokens = 1 if self.is_head_major else SOURCE_BLOCK
        step = self.target_heads * HEAD_BYTES
        source_ids, target_ids = self.source_ids.tolist(), self.target_ids.tolist()
        for layer, plane in product(range(layers), range(2)):
            for index, block in enumerate(source_ids):
                position = index * SOURCE_BLOCK
                source = plane * planes[0] + block * source_bytes
                target = (
                    plane * planes[1] + target_ids[position // self.target_block] * target_bytes
                )
                if self.is_head_major:
                    target += self.head * self.target_block * HEAD_BYTES
                else:
                    target += position % self.target_block * step + self.head * HEAD_BYTES
                for token in range(tokens):
                    from_offset, to_offset = source + token * HEAD_BYTES, target + token * step
                    rows.append((layer, from_offset, layer, to_offset, self.run_bytes))
        rows.sort(key=lambda row: (row[2], row[3]))
        return rows


def register(engine: EngineSpec, rank: int, num_blocks: int) -> KVCache:
    """Register tensors whose memory nobody touches, so that they take none."""
    slots = engine.tensor_slots(rank)
    return KVCache(engine, rank, [np.empty(slot.shape(num_blocks), np.uint16) for slot in slots])


def plan_of_three() -> list[str]:
    tokens = 1 << 20
    groups = [AttentionGroup(tuple(range(20 * g, 20 * g + 20)), HEADS, 128) for g in range(3)]
    model = ModelSpec(tuple(groups))
    source = EngineSpec("prefill", model, 16, "HND", tp_size=8)
    target = EngineSpec("decode", model, 16, "NHD", tp_size=4)
    route = Route(source, target)
    ids = [np.random.default_rng(seed).permutation(tokens // 16) for seed in range(3)]
    seconds = medians({"plan": lambda: route.plan(0, ids, ids, tokens=(0, tokens))}, rounds=ROUNDS)
    return [f"{len(ids[0]):,} blocks a group and side", f"{seconds['plan'] * 1e3:.1f}"]


if __name__ == "__main__":
    main()
