"""Between pinned host memory and a GPU, by fragment size: kernels against the copy engine.

Which of them copies is decided by variables that are read once, so each way has a process of its
own. The last lines are the values that this machine asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

TOTAL_BYTES = 256 << 20
MAX_FRAGMENTS = 1 << 16
FRAGMENT_BYTES = tuple(1 << power for power in range(8, 23))
NEVER, ALWAYS = str(1 << 62), "0"
SIZES = ("KVFERRY_CUDA_UPLOAD_BYTES", "KVFERRY_CUDA_DOWNLOAD_BYTES")
FEW = "KVFERRY_CUDA_MIN_KERNEL_PIECES"
WAYS = {"kernel": {**dict.fromkeys(SIZES, NEVER), FEW: "0"}, "engine": dict.fromkeys(SIZES, ALWAYS)}


def measure():
    """Print GB/s by direction and fragment size, and of plain copies, as JSON."""
    import torch
    from _events import STREAM, device_seconds, permutation

    from kvferry import copy

    host = torch.zeros(TOTAL_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, device="cuda")
    result = {}
    for direction, source, target in (("h2d", host, device), ("d2h", device, host)):

        def plain(source=source, target=target):
            target.copy_(source, non_blocking=True)

        speeds = {"plain": TOTAL_BYTES / device_seconds({"it": plain}, rounds=5)["it"] / 1e9}
        for size in FRAGMENT_BYTES:
            count = min(TOTAL_BYTES // size, MAX_FRAGMENTS)
            ends = [{"a": end[: count * size].view(count, size)} for end in (source, target)]
            ids = [permutation(count, seed).numpy() for seed in (1, 2)]

            def run(ends=ends, ids=ids, direction=direction):
                copy.copy_kv_blocks(*ends, *ids, direction, stream=STREAM.cuda_stream)

            speeds[str(size)] = count * size / device_seconds({"it": run}, rounds=3)["it"] / 1e9
        result[direction] = speeds
    print(json.dumps(result))


def crossover(kernel, engine):
    """Return the smallest size from which on the engine is at least as fast."""
    first = None
    for size in FRAGMENT_BYTES:
        if engine[str(size)] < kernel[str(size)]:
            first = None
        elif first is None:
            first = size
    return first


def main():
    from _events import print_table

    speeds = {}
    for way, variables in WAYS.items():
        output = subprocess.run(
            [sys.executable, __file__, "measure"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        speeds[way] = json.loads(output)
    names = [(direction, way) for direction in ("h2d", "d2h") for way in WAYS]
    rows = [
        [f"{size:,} B" if size < 1024 else f"{size >> 10:,} KiB"]
        + [f"{speeds[way][direction][str(size)]:.1f}" for direction, way in names]
        for size in FRAGMENT_BYTES
    ]
    rows.append(["plain copy"] + [f"{speeds[w][d]['plain']:.1f}" for d, w in names])
    print_table(["GB/s by fragment"] + [f"{d} {w}" for d, w in names], rows)
    for variable, direction in zip(SIZES, ("h2d", "d2h"), strict=True):
        size = crossover(*(speeds[way][direction] for way in WAYS))
        print(f"{variable}={NEVER if size is None else size}")


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
