"""Engine groups under the names of LMCache's `lmcache.v1.multiprocess.group_view`.

Examples
--------
>>> from kvferry.integrations.lmcache import EngineGroupInfo, expand_engine_block_ids
>>> groups = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1,)), EngineGroupInfo(0, (3,))]
>>> expand_engine_block_ids(groups, [[7, 8], [40]])
[[7, 8], [40], [7, 8]]
"""

from kvferry.groups import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
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

# Private by name there, and imported all the same.
_engine_group_id_per_view = engine_group_ids_per_view
