"""Engine groups: block-id address spaces of a serving engine, and the ids that cover a token range.

An *engine group* is one address space of block ids, a *KV group* (`EngineGroupInfo`) a set of
layers of one engine group that are copied together. The order of KV groups is that of the protocol,
and no groups at all mean one that is not hybrid.
"""

from __future__ import annotations

import msgspec

from kvferry._core import (
    EXCLUDED_ENGINE_GROUP,
    engine_group_ids_per_view,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
    slice_block_ids_per_group,
)

__all__ = [
    "EXCLUDED_ENGINE_GROUP",
    "EngineGroupInfo",
    "engine_group_ids_per_view",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "get_engine_group_indices",
    "num_engine_group_infos",
    "num_engine_groups",
    "slice_block_ids_per_group",
]


class EngineGroupInfo(msgspec.Struct, frozen=True):
    """One KV group: layers of one engine group that are copied together.

    It travels as a map of its four fields. A reader ignores keys that it does not know and takes
    the defaults of those that are missing, so that old and new peers understand each other.

    Parameters
    ----------
    engine_group_id
        The block-id address space of these layers. Several KV groups may share one.
    layer_indices
        Indices of registered layers.
    tokens_per_block
        Tokens that one block id covers; 0: the engine did not say.
    sw_size_tokens
        Sliding window in tokens; -1: not sliding-window attention.

    Examples
    --------
    >>> import msgspec
    >>> group = EngineGroupInfo(1, layer_indices=(0, 2), tokens_per_block=16)
    >>> message = msgspec.msgpack.encode(group)
    >>> msgspec.msgpack.decode(message)["layer_indices"]
    [0, 2]
    >>> msgspec.msgpack.decode(message, type=EngineGroupInfo) == group
    True
    """

    engine_group_id: int
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0
    sw_size_tokens: int = -1
