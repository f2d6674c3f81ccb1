"""A program: copies and repairs by each kernel that is named, judged by the models.

Which kernel a process uses is read once, so each has a forked process of its own. Those share the
imports, which take longer than all the rest.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "property"))

from block_models import copy_by_hand, repair_by_hand, strided
from judging import Sources, judge_target, poisoned_target, route_of

from kvferry import AttentionGroup, EngineSpec, ModelSpec, copy
from kvferry.testing import Scenario, Side

# Either side of all lengths at which a kernel changes its way of copying.
EDGES = (1, 32, 64, 96, 128, 256, 512, 4096)
LENGTHS = sorted({edge + by for edge in EDGES for by in (-1, 0, 1)} - {0} | {192, 320, 9000})
REPAIRS = {
    "kv_postprocess_blksize_on_receive": (2,),
    "kv_postprocess_layout_on_receive": (),
    "kv_postprocess_blksize_and_layout_on_receive": (2,),
}


def check_blocks(length):
    """Copy blocks between memories that begin anywhere; runs are `length` bytes, or a block."""
    sizes = {"layers": 1, "tokens": 4, "heads": 3, "key_dim": length}
    for shift, target_layout in enumerate(("KBNHD", "BKHND")):
        inner = (4, 3, length) if target_layout == "KBNHD" else (3, 4, length)
        outer = (2, 5) if target_layout == "KBNHD" else (5, 2)
        source = strided((2, 4, 4, 3, length), item_bytes=1, margin=3 + 7 * shift, seed=length)
        target = strided(
            (*outer, *inner), item_bytes=1, margin=64 + 33 * shift, padding=[0, 5, 0, 0, 0]
        )
        expected = target.memory.copy()
        twin = np.lib.stride_tricks.as_strided(
            expected[target.begin :], target.array.shape, target.array.strides
        )
        layouts = {"source_layout": "KBNHD", "target_layout": target_layout}
        copy_by_hand([source.array], [twin], [2, 0, 3], [4, 1, 0], **layouts, **sizes)
        copy.copy_blocks(source.array, target.array, [2, 0, 3], [4, 1, 0], **layouts)
        np.testing.assert_array_equal(target.memory, expected)


def check_repairs(length):
    for name, ratio in REPAIRS.items():
        case = strided((3, 4, 3, length), item_bytes=1, margin=5, padding=[3, 0, 0, 0])
        expected = case.memory.copy()
        twin = np.lib.stride_tricks.as_strided(
            expected[case.begin :], case.array.shape, case.array.strides
        )
        repair_by_hand(name, twin, [2, 0], *ratio)
        getattr(copy, name)(case.array, [2, 0], *ratio)
        np.testing.assert_array_equal(case.memory, expected)


def check_plans(length):
    """Run a plan between block sizes and layouts, of a request that begins inside a block."""
    model = ModelSpec((AttentionGroup((0, 1), 3, length, dtype="uint8"),))
    source = EngineSpec("source", model, 4, "KBNHD")
    target = EngineSpec("target", model, 6, "KBHND")
    ends = Side(source, ([3, 0, 2],), num_blocks=(5,)), Side(target, ([1, 2],), num_blocks=(3,))
    scenario = Scenario(*ends, tokens=(1, 11), seed=length)
    rng = random.Random(length)
    sources = Sources(scenario, rng)
    plan = route_of(scenario).plan(0, *scenario.request)
    sources.need(plan.source_ranks)
    tensors, cache, before = poisoned_target(scenario, 0, rng)
    plan.copy([sources.caches[rank] for rank in plan.source_ranks], cache)
    judge_target(scenario, 0, tensors, before, f"{length} bytes a head")
    sources.assert_unchanged()


def check_threads():
    """Copy rows of an odd length, four threads' worth, from and to odd addresses."""
    source = np.random.default_rng(1).integers(0, 256, (60, 300_007), np.uint8)
    ids = np.random.default_rng(2).permutation(59)
    expected = np.zeros_like(source)
    expected[ids, 3:] = source[1:, 2:-1]
    for threads in (1, 2, 3, 4):
        target = np.zeros_like(source)
        ends = {"a": source[1:, 2:-1]}, {"a": target[:, 3:]}
        copy.copy_kv_blocks(*ends, range(59), ids, "h2d", threads=threads)
        np.testing.assert_array_equal(target, expected)


def check_all():
    for length in LENGTHS:
        check_blocks(length)
        check_repairs(length)
        check_plans(length)
    check_threads()


def main(names):
    failed = []
    for name in names:
        child = os.fork()
        if child == 0:
            os.environ["KVFERRY_KERNEL"] = name
            try:
                check_all()
            except BaseException as error:
                print(f"{name}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(name)
    sys.exit(f"these kernels failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
