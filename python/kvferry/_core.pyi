"""The compiled part of kvferry; import its names from `kvferry`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvferry.cache import RankDescription
from kvferry.plan import Explanation
from kvferry.specs import EngineSpec, Group, ModelSpec

__all__ = [
    "CUDA_THRESHOLDS",
    "EXCLUDED_ENGINE_GROUP",
    "Descriptors",
    "Engine",
    "KVCache",
    "Loops",
    "Plan",
    "Route",
    "Staged",
    "StagedDescriptors",
    "TensorSlot",
    "__version__",
    "block_size_ratio",
    "calibrate_cuda",
    "canonical_layout",
    "check_group",
    "check_local",
    "check_model",
    "copy_blocks",
    "copy_kv_blocks",
    "cuda_unavailable_reason",
    "engine_group_ids_per_view",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "get_engine_group_indices",
    "get_num_threads",
    "heads_per_rank",
    "kernels",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "num_engine_group_infos",
    "num_engine_groups",
    "replicates_heads",
    "set_num_threads",
    "slice_block_ids_per_group",
    "target_ranks",
    "tp_ratio",
]

__version__: str
CUDA_THRESHOLDS: list[str]
EXCLUDED_ENGINE_GROUP: int

# Integers, or an array of them: numpy's, one that speaks DLPack, a buffer.
_GroupIds: TypeAlias = Sequence[int] | Any

class _EngineGroup(Protocol):
    @property
    def engine_group_id(self) -> int: ...
    @property
    def layer_indices(self) -> Sequence[int]: ...

def canonical_layout(text: str) -> str: ...
def check_group(group: Group) -> None: ...
def check_model(model: ModelSpec) -> None: ...
def copy_blocks(
    source: Any,
    target: Any,
    source_block_ids: Any,
    target_block_ids: Any,
    *,
    source_layout: str,
    target_layout: str,
    stream: int | None = None,
    threads: int | None = None,
) -> None: ...
def copy_kv_blocks(
    src_kv_caches: Mapping[str, Any],
    dst_kv_caches: Mapping[str, Any],
    src_block_ids: Any,
    dst_block_ids: Any,
    direction: Literal["h2d", "d2h"],
    *,
    strict: bool = False,
    stream: int | None = None,
    threads: int | None = None,
) -> None: ...
def kv_postprocess_blksize_on_receive(
    cache: Any,
    indices: Any,
    block_size_ratio: SupportsIndex,
    *,
    stream: int | None = None,
    threads: int | None = None,
) -> None: ...
def kv_postprocess_layout_on_receive(
    cache: Any, indices: Any, *, stream: int | None = None, threads: int | None = None
) -> None: ...
def kv_postprocess_blksize_and_layout_on_receive(
    cache: Any,
    indices: Any,
    block_size_ratio: SupportsIndex,
    *,
    stream: int | None = None,
    threads: int | None = None,
) -> None: ...

_BusSpeeds: TypeAlias = tuple[float, list[tuple[int, float, float]]]

def calibrate_cuda(device: int, total_bytes: int) -> tuple[_BusSpeeds, _BusSpeeds, list[int]]: ...
def cuda_unavailable_reason() -> str | None: ...
def kernels() -> tuple[str, ...]: ...
def get_num_threads() -> int: ...
def set_num_threads(threads: int | None) -> None: ...
def num_engine_groups(groups: Sequence[_EngineGroup]) -> int: ...
def num_engine_group_infos(groups: Sequence[_EngineGroup]) -> int: ...
def engine_group_ids_per_view(groups: Sequence[_EngineGroup]) -> tuple[int, ...]: ...
def engine_group_layer_indices(groups: Sequence[_EngineGroup]) -> list[list[int]]: ...
def expand_engine_block_ids(
    groups: Sequence[_EngineGroup],
    engine_side_block_ids: Sequence[_GroupIds] | _GroupIds,
    *,
    strict: bool = False,
) -> list[Any]: ...
def slice_block_ids_per_group(
    allocated_block_ids: Mapping[int, _GroupIds],
    group_tokens_per_block: Sequence[SupportsIndex],
    start_token_idx: SupportsIndex,
    end_token_idx: SupportsIndex,
    *,
    strict: bool = False,
) -> list[Any]: ...
def get_engine_group_indices(
    groups: Sequence[_EngineGroup],
    num_registered_layers: SupportsIndex,
    *,
    strict: bool = False,
) -> list[int] | None: ...
def check_local(
    tp_rank: SupportsIndex,
    tp_size: SupportsIndex,
    block_size: SupportsIndex,
    total_num_kv_heads: SupportsIndex,
) -> None: ...
def tp_ratio(local_tp_size: SupportsIndex, remote_tp_size: SupportsIndex) -> int: ...
def target_ranks(
    tp_rank: SupportsIndex, tp_size: SupportsIndex, remote_tp_size: SupportsIndex
) -> list[int]: ...
def heads_per_rank(num_kv_heads: SupportsIndex, tp_size: SupportsIndex) -> int: ...
def replicates_heads(num_kv_heads: SupportsIndex, tp_size: SupportsIndex) -> bool: ...
def block_size_ratio(local_block_size: SupportsIndex, remote_block_size: SupportsIndex) -> int: ...

@final
class Engine:
    def __new__(cls, spec: EngineSpec) -> Engine: ...
    @property
    def num_ranks(self) -> int: ...
    def tensor_slots(self, rank: SupportsIndex) -> tuple[TensorSlot, ...]: ...

@final
class TensorSlot:
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def planes(self) -> tuple[str, ...]: ...
    @property
    def layout(self) -> str: ...
    @property
    def item_bytes(self) -> int: ...
    def shape(self, num_blocks: int) -> tuple[int, ...]: ...

@final
class KVCache:
    def __new__(
        cls,
        engine: EngineSpec,
        rank: SupportsIndex,
        tensors: Sequence[Any] | Mapping[str, Any],
        *,
        axes: str | tuple[str | None, ...] | None = None,
    ) -> KVCache: ...
    @property
    def engine(self) -> EngineSpec: ...
    @property
    def rank(self) -> int: ...
    def describe(self) -> RankDescription: ...

@final
class Route:
    def __new__(
        cls, source: EngineSpec, target: EngineSpec, *, allow_missing_layers: bool = False
    ) -> Route: ...
    @property
    def source(self) -> EngineSpec: ...
    @property
    def target(self) -> EngineSpec: ...
    def readers(self, source_rank: SupportsIndex) -> tuple[int, ...]: ...
    def plan(
        self,
        target_rank: SupportsIndex,
        source_blocks: Sequence[Any],
        target_blocks: Sequence[Any],
        tokens: tuple[int, int],
        *,
        source_first_token: int | Sequence[int] | None = None,
        target_first_token: int | Sequence[int] | None = None,
    ) -> Plan: ...
    def plan_push(
        self,
        source_rank: SupportsIndex,
        source_blocks: Sequence[Any],
        target_blocks: Sequence[Any],
        tokens: tuple[int, int],
        *,
        source_first_token: int | Sequence[int] | None = None,
        target_first_token: int | Sequence[int] | None = None,
    ) -> Plan: ...

@final
class Plan:
    @property
    def pairs(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def source_ranks(self) -> tuple[int, ...]: ...
    @property
    def target_ranks(self) -> tuple[int, ...]: ...
    @property
    def notify_only(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def descriptors(
        self, source: KVCache | RankDescription, target: KVCache | RankDescription
    ) -> Descriptors: ...
    def loops(
        self, source: KVCache | RankDescription, target: KVCache | RankDescription
    ) -> Loops: ...
    def staged(
        self, source: KVCache | RankDescription, target: KVCache | RankDescription
    ) -> Staged: ...
    def recommend_staging(
        self,
        source: KVCache | RankDescription,
        target: KVCache | RankDescription,
        *,
        min_mean_bytes: int = 4096,
    ) -> bool: ...
    def copy(
        self,
        sources: KVCache | Sequence[KVCache],
        targets: KVCache | Sequence[KVCache],
        *,
        stream: int | None = None,
        threads: int | None = None,
    ) -> None: ...
    def explain(
        self,
        sources: KVCache | RankDescription | Sequence[KVCache | RankDescription] | None = None,
        targets: KVCache | RankDescription | Sequence[KVCache | RankDescription] | None = None,
    ) -> Explanation: ...
    def to_svg(self) -> str: ...

@final
class Descriptors:
    @property
    def source_tensor(self) -> npt.NDArray[np.int64]: ...
    @property
    def source_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_tensor(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def length(self) -> npt.NDArray[np.int64]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def min_bytes(self) -> int: ...
    @property
    def mean_bytes(self) -> float: ...
    def __len__(self) -> int: ...

@final
class Loops:
    @property
    def source_tensor(self) -> npt.NDArray[np.int64]: ...
    @property
    def source_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_tensor(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def run_bytes(self) -> npt.NDArray[np.int64]: ...
    @property
    def counts(self) -> npt.NDArray[np.int64]: ...
    @property
    def source_strides(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_strides(self) -> npt.NDArray[np.int64]: ...
    @property
    def table_begin(self) -> npt.NDArray[np.int64]: ...
    @property
    def table_end(self) -> npt.NDArray[np.int64]: ...
    @property
    def source_table(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_table(self) -> npt.NDArray[np.int64]: ...
    @property
    def total_bytes(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Staged:
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def descriptors(self) -> StagedDescriptors: ...
    def finish(self, scratch: Any, target: KVCache, *, stream: int | None = None) -> None: ...

@final
class StagedDescriptors:
    @property
    def source_tensor(self) -> npt.NDArray[np.int64]: ...
    @property
    def source_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def scratch_offset(self) -> npt.NDArray[np.int64]: ...
    @property
    def length(self) -> npt.NDArray[np.int64]: ...
    @property
    def total_bytes(self) -> int: ...
    def __len__(self) -> int: ...
