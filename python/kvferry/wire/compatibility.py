"""What makes two engines compatible, as a string."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvferry.specs import AttentionGroup, EngineSpec, Group, LatentGroup, ModelSpec
from kvferry.wire.limits import VERSION


def fingerprint(engine: EngineSpec | ModelSpec) -> str:
    """Return what makes two engines compatible, as a string: equal where a `Route` can be made.

    It stands for every layer's index and kind of cache with its heads, sizes, dtype, sliding window
    and tokens a slot. Names, groupings, sharding, layouts and tokens a block do not enter. Engines
    of which one lacks layers (``allow_missing_layers``) have different fingerprints.

    Parameters
    ----------
    engine
        An engine, or the model that it serves.

    Returns
    -------
    str
        64 hexadecimal digits, the same on every machine and in every version of kvferry with the
        same major wire version.

    Raises
    ------
    TypeError
        `engine` is neither.

    Examples
    --------
    >>> model = ModelSpec((AttentionGroup(layers=range(4), num_kv_heads=8, head_dim=128),))
    >>> fingerprint(model) == fingerprint(model.regroup([[0, 2], [1, 3]]))
    True
    >>> fingerprint(model)[:16]
    'f5c16598efacbbe5'
    """
    model = engine.model if isinstance(engine, EngineSpec) else engine
    if not isinstance(model, ModelSpec):
        raise TypeError(f"expected an EngineSpec or a ModelSpec, got {type(engine)}")
    layers = []
    for group in model.groups:
        geometry = _geometry(group)
        # A layer may have a state beside its attention; the two never stand for each other.
        layers += [(layer, geometry[0] == "state", geometry) for layer in group.layers]
    layers.sort(key=lambda entry: entry[:2])
    named = [(layer, geometry) for layer, _, geometry in layers]
    return hashlib.sha256(msgspec.json.encode(("kvferry", VERSION[0], named))).hexdigest()


def _geometry(group: Group) -> tuple[Any, ...]:
    """Return all that two groups with a layer in common must agree on, defaults filled in."""
    if isinstance(group, AttentionGroup):
        value_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
        sizes = (group.num_kv_heads, group.head_dim, value_dim)
        return "attention", *sizes, group.dtype, group.sliding_window, group.tokens_per_slot
    if isinstance(group, LatentGroup):
        return "latent", group.latent_dim, group.dtype, group.tokens_per_slot
    parts = []
    for part in group.parts:
        axis, units = part.shard_axis, part.shard_units
        if axis is not None and units is None:
            units = part.shape[axis]
        parts.append((part.name, part.shape, part.dtype, axis, units))
    return "state", parts
