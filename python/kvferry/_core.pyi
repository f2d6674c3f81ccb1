"""The compiled part of kvferry; import its names from `kvferry`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex, final

import numpy as np
import numpy.typing as npt

from kvferry.cache import RankDescription
from kvferry.plan import Explanation
from kvferry.specs import EngineSpec, Group, ModelSpec

__all__ = [
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
    "canonical_layout",
    "check_group",
    "check_model",
    "copy_blocks",
    "copy_kv_blocks",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
]

__version__: str

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
