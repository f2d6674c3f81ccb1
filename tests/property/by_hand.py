"""Engines for hand-computed cases: plain objects, for the oracle reads attributes only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.testing import slots, tensor_shape


def group(layers: Any = (0,), heads: int = 2, dim: int = 4, **changes: Any) -> Any:
    """Make an attention group of 2-byte elements."""
    fields = {
        "layers": layers,
        "num_kv_heads": heads,
        "head_dim": dim,
        "v_head_dim": None,
        "dtype": "bfloat16",
        "sliding_window": -1,
        "tokens_per_slot": 1,
    }
    return SimpleNamespace(**{**fields, **changes})


def latent(layers: Any = (0,), dim: int = 6, **changes: Any) -> Any:
    """Make a latent group of 1-byte elements."""
    fields = {"layers": layers, "latent_dim": dim, "dtype": "uint8", "tokens_per_slot": 1}
    return SimpleNamespace(**{**fields, **changes})


def part(name: str, shape: Any, axis: int | None = 0, units: int | None = None) -> Any:
    """Make a state part of 1-byte elements."""
    return SimpleNamespace(
        name=name, shape=shape, dtype="uint8", shard_axis=axis, shard_units=units
    )


def state(*parts: Any, layers: Any = (0,)) -> Any:
    return SimpleNamespace(layers=layers, parts=parts)


def engine(
    *groups: Any, tokens_per_block: Any = 4, layout: Any = "KBNHD", tp_size: int = 1, **changes: Any
) -> Any:
    """Make an engine, of one attention group unless said otherwise."""
    fields = {
        "model": SimpleNamespace(groups=groups or (group(),)),
        "tokens_per_block": tokens_per_block,
        "layout": layout,
        "tp_size": tp_size,
        "pp_size": 1,
        "cp_size": 1,
        "cp_interleave": 1,
        "pp_layers": None,
        "head_ranges": None,
        "null_block_id": None,
        "physical_blocks_per_block": 1,
        "num_blocks": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def dense(an_engine: Any, rank: int, num_blocks: int) -> list[np.ndarray]:
    """Return a rank's tensors as zeroed bytes."""
    shapes = [tensor_shape(an_engine, rank, slot, num_blocks) for slot in slots(an_engine, rank)]
    return [np.zeros(shape, np.uint8) for shape in shapes]
