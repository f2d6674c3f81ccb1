"""Draws the pictures of the documentation; run it after a change of `kvferry.picture`."""

from __future__ import annotations

from pathlib import Path

from kvferry import (
    AttentionGroup,
    EngineSpec,
    LatentGroup,
    ModelSpec,
    Plan,
    Route,
    StateGroup,
    StatePart,
)

FOLDER = Path(__file__).parent


def blocks() -> Plan:
    """24 tokens a block meet 16, and TP 4 meets TP 2."""
    model = attention(num_kv_heads=8)
    source = EngineSpec("prefill", model, tokens_per_block=24, layout="KBHND", tp_size=4)
    target = EngineSpec("decode", model, tokens_per_block=16, layout="KBNHD", tp_size=2)
    return Route(source, target).plan(0, [[7, 3, 9]], [[5, 2, 1, 8]], tokens=(0, 60))


def replicas() -> Plan:
    """Four ranks hold two heads, and one reads them."""
    model = attention(num_kv_heads=2)
    source = EngineSpec("prefill", model, tokens_per_block=16, layout="BHNC", tp_size=4)
    target = EngineSpec("decode", model, tokens_per_block=64, layout="BHNC")
    return Route(source, target).plan(0, [[3, 8, 6, 1, 4]], [[2, 7]], tokens=(0, 80))


def hybrid() -> Plan:
    """One rank sends a sliding window, a state and latent vectors."""
    conv = StatePart("conv", shape=(96, 3), dtype="bfloat16", shard_axis=0)
    window = AttentionGroup((0, 3), num_kv_heads=4, head_dim=128, sliding_window=48)
    latent = LatentGroup((1,), latent_dim=576)
    model = ModelSpec(groups=(window, StateGroup((2, 4), parts=(conv,)), latent))
    source = EngineSpec("prefill", model, 32, "BNHC", null_block_id=0)
    target = EngineSpec("decode", model, 16, "BNHC", tp_size=4, null_block_id=0)
    request = [[0, 12, 13], [5], [30, 31, 32]], [[0, 0, 0, 14, 15, 16], [2], range(40, 46)]
    return Route(source, target).plan_push(0, *request, tokens=(0, 92))


def chunks() -> Plan:
    """Pages of an engine, key and value packed, fill chunk objects of a pool."""
    model = attention(num_kv_heads=8)
    source = EngineSpec("engine", model, tokens_per_block=16, layout="BHNC", tp_size=2)
    target = EngineSpec("pool", model, tokens_per_block=64, layout="BKLNHD")
    return Route(source, target).plan(0, [[9, 4, 7, 1, 12, 3]], [[2, 5]], tokens=(0, 96))


def attention(num_kv_heads: int) -> ModelSpec:
    """One group of 32 layers."""
    return ModelSpec(groups=(AttentionGroup(tuple(range(32)), num_kv_heads, head_dim=128),))


def pictures() -> dict[str, str]:
    """File names, and what is in the files."""
    return {f"{plan.__name__}.svg": plan().to_svg() for plan in (blocks, replicas, hybrid, chunks)}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
