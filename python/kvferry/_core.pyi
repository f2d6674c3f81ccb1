"""The compiled part of kvferry; import its names from `kvferry`."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
import numpy.typing as npt

from kvferry.cache import RankDescription
from kvferry.plan import Explanation
from kvferry.specs import EngineSpec, Group, ModelSpec

__all__ = [
    "Descriptors",
    "Engine",
    "KVCache",
    "Plan",
    "Route",
    "TensorSlot",
    "canonical_layout",
    "check_group",
    "check_model",
]

def canonical_layout(text: str) -> str: ...
def check_group(group: Group) -> None: ...
def check_model(model: ModelSpec) -> None: ...

@final
class Engine:
    def __new__(cls, spec: EngineSpec) -> Engine: ...
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
