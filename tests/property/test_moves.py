"""Descriptors and loops, row by row: the fewest rows for the runs that the contract names."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from judging import Sources, examples, poisoned_target, route_of, rows_of, some

from kvferry.testing import (
    Scenario,
    coalesce,
    expand_loops,
    expected_moves,
    greedy_count,
)
from kvferry.testing.strategies import scenarios

TABLE_COLUMNS = ("source_tensor", "target_tensor", "run_bytes", "table_begin", "table_end")


@settings(max_examples=examples(4))
@given(scenarios())
def test_rows_are_what_moves_in_as_few_rows_as_can_be(scenario: Scenario) -> None:
    """Descriptors are the merged runs of the oracle, and loops stand for the same bytes."""
    rng = random.Random(scenario.seed)
    route, sources = route_of(scenario), Sources(scenario, rng)
    for rank in some(route.target.num_ranks, rng, 2):
        plan = route.plan(rank, *scenario.request, **scenario.firsts)
        sources.need(plan.source_ranks)
        tensors, cache, _ = poisoned_target(scenario, rank, rng)
        for source_rank in plan.source_ranks:
            runs = expected_moves(
                *scenario.engines, source_rank, rank, sources.tensors[source_rank], tensors,
                *scenario.request, **scenario.firsts,
            )  # fmt: skip
            ends = sources.caches[source_rank], cache
            rows = rows_of(plan.descriptors(*ends))
            assert len(rows) <= greedy_count(runs)
            assert np.array_equal(rows, coalesce(runs))
            _judge_loops(plan.loops(*ends), rows)


def _judge_loops(loops: object, rows: np.ndarray) -> None:
    for name in TABLE_COLUMNS:
        column = getattr(loops, name)
        assert column.dtype == np.int64 and column.shape == (len(loops),), name
    for name in ("counts", "source_strides", "target_strides"):
        table = getattr(loops, name)
        assert table.dtype == np.int64 and table.shape == (len(loops), 4), name
    assert (loops.counts >= 1).all() and (loops.run_bytes >= 1).all()
    assert (loops.table_begin < loops.table_end).all()
    assert len(loops.source_table) == len(loops.target_table)
    expanded = expand_loops(loops)
    assert loops.total_bytes == expanded[:, 4].sum() == rows[:, 4].sum()
    assert np.array_equal(coalesce(expanded), rows)
