"""Block ids sliced by token range and expanded to KV groups, beside plain Python.

Lists have to be copied, since their owners go on appending; plain Python copies what it slices
once, so that is what there is to match. Of arrays only views are made, whatever their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from _measure import medians, print_heading, print_table

from kvferry.groups import EngineGroupInfo, expand_engine_block_ids, slice_block_ids_per_group

NUM_GROUPS, NUM_IDS, TOKENS_PER_BLOCK = 8, 100_000, 16
ARRAY_IDS = (1_000, 10_000_000)
# A call on arrays takes a microsecond or so: less than a timer resolves well.
CALLS = 1_000
ROUNDS = 101
GROUPS = [EngineGroupInfo(group) for group in reversed(range(NUM_GROUPS))]
SIZES = [TOKENS_PER_BLOCK] * NUM_GROUPS


def main() -> None:
    note = f"{NUM_GROUPS} groups of {NUM_IDS:,} ids each, medians of {ROUNDS} interleaved rounds"
    print_heading("Groups", note)
    # Each id is an object of its own, as ids that an engine hands over are.
    lists = [list(range(group, group + NUM_IDS)) for group in range(NUM_GROUPS)]
    rows = [
        *compare("lists", lists, list.__getitem__, list),
        *compare("tuples", [tuple(ids) for ids in lists], copied_slice, list),
        *compare("ranges", [range(NUM_IDS)] * NUM_GROUPS, copied_slice, list),
    ]
    print_table(["", "ms", "plain Python", "ratio"], rows)
    header = [
        "arrays, microseconds a call; ids a group:",
        *(f"{count:,}" for count in ARRAY_IDS),
        "ratio",
    ]
    print_table(header, [constant_time("slice", slice_all), constant_time("expand", expand)])


def compare(
    name: str,
    per_group: Sequence[Sequence[int]],
    plain_slice: Callable[[Sequence[int], slice], list[int]],
    plain_copy: Callable[[Sequence[int]], list[int]],
) -> list[list[str]]:
    """Time the middle of every group's ids, and all of them, against plain Python."""
    allocated = dict(enumerate(per_group))
    first, last = NUM_IDS // 100, NUM_IDS - NUM_IDS // 100
    tokens = first * TOKENS_PER_BLOCK, last * TOKENS_PER_BLOCK

    def sliced() -> list[list[int]]:
        return slice_block_ids_per_group(allocated, SIZES, *tokens)

    def plainly_sliced() -> list[list[int]]:
        results = []
        for group, size in enumerate(SIZES):
            begin, end = tokens[0] // size, tokens[1] // size
            results.append(plain_slice(allocated.get(group, ()), slice(begin, end)))
        return results

    def expanded() -> list[list[int]]:
        return expand_engine_block_ids(GROUPS, per_group)

    def plainly_expanded() -> list[list[int]]:
        return [plain_copy(per_group[group.engine_group_id]) for group in GROUPS]

    rows = []
    for verb, ours, plain in [
        ("slice", sliced, plainly_sliced),
        ("expand", expanded, plainly_expanded),
    ]:
        assert ours() == plain()
        seconds = medians({"ours": ours, "plain": plain}, rounds=ROUNDS)
        times = [f"{seconds[who] * 1e3:.3f}" for who in ("ours", "plain")]
        rows.append([f"{verb} {name}", *times, f"{seconds['ours'] / seconds['plain']:.2f}x"])
    return rows


def copied_slice(ids: Sequence[int], part: slice) -> list[int]:
    return list(ids[part])


def slice_all(arrays: Sequence[np.ndarray]) -> object:
    tokens = len(arrays[0]) * TOKENS_PER_BLOCK
    return slice_block_ids_per_group(dict(enumerate(arrays)), SIZES, 0, tokens)


def expand(arrays: Sequence[np.ndarray]) -> object:
    return expand_engine_block_ids(GROUPS, arrays)


def constant_time(verb: str, call: Callable[[Sequence[np.ndarray]], object]) -> list[str]:
    """Time calls on short and on long arrays."""
    arrays = {count: [np.zeros(count, np.int64)] * NUM_GROUPS for count in ARRAY_IDS}

    def repeated(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                call(arrays[count])

        return run

    seconds = medians({str(count): repeated(count) for count in ARRAY_IDS}, rounds=ROUNDS // 5)
    short, long = (seconds[str(count)] / CALLS for count in ARRAY_IDS)
    return [f"{verb} arrays", f"{short * 1e6:.2f}", f"{long * 1e6:.2f}", f"{long / short:.2f}x"]


if __name__ == "__main__":
    main()
