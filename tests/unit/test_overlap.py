"""Overlap, byte by byte: random tensors in one small buffer against a set of addresses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from buffers import random_case

from kvferry.errors import OverlapError


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_found_exactly_where_bytes_meet(seed):
    rng = random.Random(seed)
    verdicts = []
    for _ in range(25):
        buffer = np.zeros(rng.choice([256, 1024, 4096]), np.uint8)
        case = random_case(rng, buffer, buffer)
        if case is None:
            continue
        reads = {move.read for move in case.moves}
        writes = {move.written for move in case.moves}
        verdicts.append(len(writes) < len(case.moves) or not reads.isdisjoint(writes))
        buffer[:] = np.random.default_rng(seed).integers(0, 256, len(buffer))
        expected = buffer.copy()
        if verdicts[-1]:
            with pytest.raises(OverlapError):
                case.plan.copy(case.sources, case.target)
        else:
            case.plan.copy(case.sources, case.target)
            before, base = expected.copy(), buffer.ctypes.data
            for move in case.moves:
                expected[move.written - base] = before[move.read - base]
        np.testing.assert_array_equal(buffer, expected)
    assert verdicts
