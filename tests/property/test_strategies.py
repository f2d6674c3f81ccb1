"""The public strategies: what they promise, and that nothing but they needs hypothesis."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples

from kvferry import KVCache, ModelSpec, Route
from kvferry.testing import Side, allocate, expected_error, slots
from kvferry.testing.strategies import block_tables, engines, models, routes


def test_the_oracle_imports_without_hypothesis_and_without_the_core() -> None:
    """Only the strategies need hypothesis; the oracle is independent of what it judges."""
    program = """
import importlib, pkgutil, sys, types
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hypothesis" or name.startswith("kvferry._core"):
            raise ImportError(f"{name} was asked for")
sys.meta_path.insert(0, Refuse())
bare = types.ModuleType("kvferry")
bare.__path__ = [sys.argv[1]]
sys.modules["kvferry"] = bare
import kvferry.testing
"""
    (package,) = sys.modules["kvferry"].__path__
    subprocess.run([sys.executable, "-c", program, package], check=True)


def test_without_hypothesis_the_strategies_say_what_to_install() -> None:
    program = """
import sys
sys.modules["hypothesis"] = None
import kvferry.testing
try:
    import kvferry.testing.strategies
except ImportError as error:
    print(error.name, error)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    message = "kvferry.testing.strategies needs hypothesis: pip install hypothesis"
    assert told.stdout == f"hypothesis {message}\n"


@settings(max_examples=examples(20))
@given(st.data(), models(), st.integers(1, 6))
def test_engines_serve_their_model_on_few_ranks(
    data: st.DataObject, model: ModelSpec, max_ranks: int
) -> None:
    """An engine has the model's layers, not more ranks than asked, and tensors that register."""
    engine = data.draw(engines(model, engine_id="mine", max_ranks=max_ranks))
    assert (engine.engine_id, engine.num_ranks <= max_ranks) == ("mine", True)
    assert _layers(engine.model) == _layers(model)
    side = data.draw(block_tables(engine, (0, 0)))
    assert sum(len(slots(engine, rank)) for rank in range(engine.num_ranks)) > 0
    for rank in range(engine.num_ranks):
        tensors = allocate(side, rank, data.draw(st.randoms(use_true_random=False)))
        assert KVCache(side.engine, rank, tensors).rank == rank


def _layers(model: ModelSpec) -> list[tuple[str, int]]:
    return sorted((type(group).__name__, layer) for group in model.groups for layer in group.layers)


@settings(max_examples=examples(20))
@given(st.data(), routes(), st.integers(0, 60), st.integers(0, 60))
def test_block_tables_fit_each_other(
    data: st.DataObject, route: Route, begin: int, length: int
) -> None:
    """Two tables for one range make a request without a fault, with ids that are all different."""
    groups = route.source.model.groups
    step = max(getattr(group, "tokens_per_slot", 1) for group in groups)
    tokens = (begin * step, (begin + length) * step)
    source, target = (data.draw(block_tables(end, tokens)) for end in (route.source, route.target))
    for side in (source, target):
        _assert_covers(side, tokens)
    request = source.blocks, target.blocks, tokens
    firsts = source.first_token, target.first_token
    assert not expected_error(source.engine, target.engine, *request, *firsts)


def _assert_covers(side: Side, tokens: tuple[int, int]) -> None:
    for g, ids in enumerate(side.blocks):
        assert len(set(ids)) == len(ids) and side.null(g) not in ids
        assert max(ids, default=0) < side.num_blocks[g]
        if side.has_tokens(g):
            assert side.first(g) <= tokens[0]
            assert side.first(g) + len(ids) * side.tokens_per_block(g) >= tokens[1]
        else:
            assert len(ids) == 1
