"""Descriptors, byte by byte: every due byte once, sorted by target, and nothing left to merge."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from buffers import random_case
from engines import rows


@pytest.mark.parametrize("seed", range(40))
def test_descriptors_name_every_due_byte_once(seed):
    rng = random.Random(seed)
    for _ in range(10):
        source_buffer, target_buffer = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        case = random_case(rng, source_buffer, target_buffer)
        if case is None or len({move.written for move in case.moves}) < len(case.moves):
            continue
        total_bytes = 0
        for source in case.sources:
            fragments = case.plan.descriptors(source, case.target)
            due = {
                (move.target_tensor, move.target_offset): (move.source_tensor, move.source_offset)
                for move in case.moves
                if move.source_rank == source.rank
            }
            named = {}
            for read_tensor, read, write_tensor, written, length in rows(fragments):
                assert length > 0
                for byte in range(length):
                    assert (write_tensor, written + byte) not in named
                    named[write_tensor, written + byte] = (read_tensor, read + byte)
            assert named == due
            targets = [(tensor, offset) for _, _, tensor, offset, _ in rows(fragments)]
            assert targets == sorted(targets)
            for one, following in itertools.pairwise(rows(fragments)):
                ends = (one[0], one[1] + one[4], one[2], one[3] + one[4])
                assert ends != following[:4], "two fragments continue each other on both sides"
            lengths = [length for *_, length in rows(fragments)]
            assert fragments.total_bytes == sum(lengths) == len(due)
            assert fragments.min_bytes == min(lengths, default=0)
            assert fragments.mean_bytes == (sum(lengths) / len(lengths) if lengths else 0)
            total_bytes += fragments.total_bytes
        assert total_bytes == case.plan.num_bytes == len(case.moves)
        explained = case.plan.explain(case.sources, case.target)
        assert explained.num_bytes == case.plan.num_bytes
