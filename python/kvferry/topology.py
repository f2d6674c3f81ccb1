"""Rank arithmetic between two engines whose TP sizes divide one another, under the field's names.

*Rank* is TP rank here, *local* the engine that asks, *remote* the one that it exchanges with.
Engines that a ratio cannot pair are `TopologyError`; `kvferry.Route` pairs them all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from kvferry import _core
from kvferry.errors import LayoutError, TopologyError

__all__ = ["BlockIds", "EngineId", "EngineTransferInfo", "TransferTopology"]

#: Block ids of one request, one list a group.
BlockIds: TypeAlias = tuple[list[int], ...] | list[list[int]]
#: Names an engine to its peers.
EngineId: TypeAlias = str


@dataclass(frozen=True)
class EngineTransferInfo:
    """What is known of a remote engine once hands are shaken.

    Parameters
    ----------
    remote_tp_size
        Its TP ranks.
    remote_block_len
        Bytes of one of its blocks.
    remote_block_size
        Tokens of one of its blocks.
    remote_physical_blocks_per_logical
        Tensor blocks that one of its block ids stands for.
    """

    remote_tp_size: int
    remote_block_len: int
    remote_block_size: int
    remote_physical_blocks_per_logical: int


@dataclass
class TransferTopology:
    """One local TP rank, and the remote engines that it exchanges with.

    Parameters
    ----------
    tp_rank, tp_size
        The local rank in ``[0, tp_size)``.
    block_size
        Tokens of a local block.
    engine_id
        The local engine.
    is_mla
        Whether the model caches latents, which every rank holds whole.
    is_mamba
        Whether some of its layers cache recurrent states.
    total_num_kv_heads
        KV heads of the whole model.
    attn_backends
        Attention backends, of which the first is asked for the shape of its cache. A Mamba model's
        is never asked.
    tensor_shape
        Shape of a registered tensor, where it may hold all layers.

    Raises
    ------
    TopologyError
        The rank, a size or the shape makes no sense; later, a remote engine's size does not divide,
        or no backend is there to ask.

    Examples
    --------
    >>> class Backend:
    ...     @staticmethod
    ...     def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
    ...         return (2, num_blocks, block_size, num_kv_heads, head_size)
    >>> topology = TransferTopology(1, 2, 64, "decode", False, False, 8, [Backend])
    >>> info = topology.register_remote_engine("prefill", EngineTransferInfo(4, 65536, 16, 1))
    >>> topology.target_remote_ranks("prefill"), topology.block_size_ratio(16)
    ([2, 3], 4)
    >>> topology.local_physical_heads, topology.split_k_and_v
    (4, True)
    """

    tp_rank: int
    tp_size: int
    block_size: int
    engine_id: EngineId
    is_mla: bool
    is_mamba: bool
    total_num_kv_heads: int
    attn_backends: Sequence[Any]
    tensor_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _core.check_local(self.tp_rank, self.tp_size, self.block_size, self.total_num_kv_heads)
        if self.tensor_shape is not None and not isinstance(self.tensor_shape, Sequence):
            raise TopologyError(f"tensor_shape={self.tensor_shape!r} is not a shape")
        self._engines: dict[EngineId, EngineTransferInfo] = {}

    @property
    def local_physical_heads(self) -> int:
        """KV heads that the local rank holds, at least one."""
        return _core.heads_per_rank(self.total_num_kv_heads, self.tp_size)

    def register_remote_engine(
        self, remote_engine_id: EngineId, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Remember a remote engine; return what is known of it, which the first registration says.

        Raises
        ------
        TopologyError
            `remote_engine_id` is the local engine.
        """
        if remote_engine_id == self.engine_id:
            raise TopologyError(
                f"engine {remote_engine_id!r} is the local engine, it cannot be its own remote"
            )
        return self._engines.setdefault(remote_engine_id, info)

    def get_engine_info(self, remote_engine_id: EngineId) -> EngineTransferInfo:
        """Return what is known of a remote engine; `KeyError` where it is not registered."""
        return self._engines[remote_engine_id]

    @cached_property
    def _kv_cache_shape(self) -> tuple[int, ...]:
        """The backend's shape of one block, with sizes that tell its axes apart."""
        if not self.attn_backends:
            raise TopologyError("attn_backends is empty, no backend says the shape of its cache")
        shape = self.attn_backends[0].get_kv_cache_shape(
            num_blocks=1, block_size=16, num_kv_heads=1, head_size=1
        )
        return tuple(shape)

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Whether the blocks are a cache's first axis, before its key and value plane."""
        return self.is_mamba or (len(self._kv_cache_shape) == 5 and self._kv_cache_shape[0] == 1)

    @property
    def cross_layers_blocks(self) -> bool:
        """Whether one registered tensor holds all layers."""
        if self.is_mamba or self.tensor_shape is None:
            return False
        return len(self.tensor_shape) == len(self._kv_cache_shape) + 1

    @property
    def split_k_and_v(self) -> bool:
        """Whether keys and values are registered as regions of their own."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return local ranks a remote one, or, negative, remote ranks a local one.

        Raises
        ------
        TopologyError
            Neither size divides the other.

        Examples
        --------
        >>> topology = TransferTopology(0, 4, 16, "decode", True, False, 1, [])
        >>> topology.tp_ratio(2), topology.tp_ratio(4), topology.tp_ratio(8)
        (2, 1, -2)
        """
        return _core.tp_ratio(self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return the remote blocks that one local block covers.

        Raises
        ------
        TopologyError
            `remote_block_size` does not divide the local one.
        """
        return _core.block_size_ratio(self.block_size, remote_block_size)

    def is_kv_replicated(self, remote_engine_id: EngineId) -> bool:
        """Whether several remote ranks hold the same KV head; `KeyError` where it is unknown."""
        remote_tp_size = self._engines[remote_engine_id].remote_tp_size
        return _core.replicates_heads(self.total_num_kv_heads, remote_tp_size)

    def replicates_kv_cache(self, remote_engine_id: EngineId) -> bool:
        """Whether several remote ranks hold the same cache; `KeyError` where it is unknown."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether several local ranks hold the same cache."""
        return self.is_mla or _core.replicates_heads(self.total_num_kv_heads, self.tp_size)

    def handshake_target_ranks(self, remote_tp_size: int) -> list[int]:
        """Return the ranks that a remote engine of that size would be asked at.

        Raises
        ------
        TopologyError
            Neither size divides the other.
        """
        return _core.target_ranks(self.tp_rank, self.tp_size, remote_tp_size)

    def target_remote_ranks(self, remote_engine_id: EngineId) -> list[int]:
        """Return the ranks of a registered engine that the local rank exchanges with.

        Raises
        ------
        KeyError
            The engine is not registered.
        TopologyError
            Neither size divides the other.
        """
        return self.handshake_target_ranks(self._engines[remote_engine_id].remote_tp_size)

    def get_transfer_cache_regions(self, cache: Any, layer_spec: Any) -> Any:
        """Return the tensors of one layer to register.

        Parameters
        ----------
        cache
            A tensor of torch or numpy; of a state layer its tensors, such as ``(conv, ssm)``.
        layer_spec
            The engine's specification of the layer. It is a state layer's where a class named
            ``MambaSpec`` is among its types, or where its ``is_state`` is true.

        Returns
        -------
        Iterable of tensor
            The first tensor of a state layer, whose allocation holds the others too; the cache
            itself where `split_k_and_v`, since iterating it gives keys, then values; else a list
            of the cache. In a Mamba model a leading dimension of 2 is swapped with the blocks.

        Raises
        ------
        LayoutError
            A state layer's cache is no list or tuple of tensors.
        """
        if _is_state(layer_spec):
            if not isinstance(cache, list | tuple) or not cache:
                raise LayoutError(
                    f"the cache of a state layer is a {type(cache).__name__}, "
                    "not a list of tensors such as (conv, ssm)"
                )
            return [cache[0]]
        if self.is_mamba and cache.shape[0] == 2:
            cache = cache.swapaxes(0, 1)
        return cache if self.split_k_and_v else [cache]

    def describe(self, remote_engine_id: EngineId) -> str:
        """Return one line for logs; `KeyError` where the engine is not registered."""
        info = self._engines[remote_engine_id]
        return (
            f"TransferTopology(tp_ratio={self.tp_ratio(info.remote_tp_size)}, "
            f"num_kv_heads={1 if self.is_mla else self.total_num_kv_heads}, "
            f"local_tp={self.tp_size}, remote_tp={info.remote_tp_size}, "
            f"local_rank={self.tp_rank}, remote_block_len={info.remote_block_len})"
        )


def _is_state(layer_spec: Any) -> bool:
    """Tell by duck type, so that no serving engine need be imported."""
    names = (kind.__name__ for kind in type(layer_spec).__mro__)
    return "MambaSpec" in names or bool(getattr(layer_spec, "is_state", False))
