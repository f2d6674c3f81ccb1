"""What a model caches per token, and how one engine shards it over ranks and blocks.

These are plain, frozen msgspec structs, so they travel between processes as they are. Every
formula of theirs lives once, in the Rust core.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry import _core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvferry._types import Integers

__all__ = [
    "AttentionGroup",
    "EngineSpec",
    "Group",
    "LatentGroup",
    "ModelSpec",
    "StateGroup",
    "StatePart",
]


class AttentionGroup(msgspec.Struct, frozen=True, tag="attention"):
    """Layers of ordinary attention that share one block-id space: a key and a value a head.

    Parameters
    ----------
    layers
        Global layer indices, each at most once.
    num_kv_heads
        KV heads of the whole model, before any sharding.
    head_dim
        Elements of one head's key.
    dtype
        Element type of the cache: ``bfloat16``, ``float16``, ``float32``, ``float64``,
        ``float8_e4m3fn``, ``float8_e5m2``, ``float8_e8m0fnu``, ``int8``, ``uint8``, ``int16``,
        ``int32``, ``int64``, or ``float4_e2m1fn_x2``, two elements a byte.
    v_head_dim
        Elements of one head's value; ``None`` means ``head_dim``.
    sliding_window
        Window in tokens, the query itself included; ``-1`` for full attention.
    tokens_per_slot
        Tokens that one slot of a block stands for.

    Raises
    ------
    ValueError
        A count is not positive, a layer is negative or named twice, or ``dtype`` is unknown.

    Examples
    --------
    >>> AttentionGroup(layers=range(32), num_kv_heads=8, head_dim=128).layers[-1]
    31
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    v_head_dim: int | None = None
    sliding_window: int = -1
    tokens_per_slot: int = 1

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            layers: Integers,
            num_kv_heads: int,
            head_dim: int,
            dtype: str = "bfloat16",
            v_head_dim: int | None = None,
            sliding_window: int = -1,
            tokens_per_slot: int = 1,
        ) -> None: ...

    def __post_init__(self) -> None:
        _freeze(self, "layers")
        _core.check_group(self)


class LatentGroup(msgspec.Struct, frozen=True, tag="latent"):
    """Layers of multi-head latent attention (MLA): one latent vector a token, on every TP rank.

    Parameters
    ----------
    layers
        Global layer indices, each at most once.
    latent_dim
        Elements of the latent vector, its rotary part included.
    dtype
        Element type of the cache.
    tokens_per_slot
        Tokens that one slot of a block stands for.

    Examples
    --------
    >>> LatentGroup(layers=range(61), latent_dim=512 + 64).latent_dim
    576
    """

    layers: tuple[int, ...]
    latent_dim: int
    dtype: str = "bfloat16"
    tokens_per_slot: int = 1

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            layers: Integers,
            latent_dim: int,
            dtype: str = "bfloat16",
            tokens_per_slot: int = 1,
        ) -> None: ...

    def __post_init__(self) -> None:
        _freeze(self, "layers")
        _core.check_group(self)


class StatePart(msgspec.Struct, frozen=True):
    """One tensor of a recurrent state, such as a convolution's window or an SSM state.

    Parameters
    ----------
    name
        Unique inside its group.
    shape
        The whole model's shape, in elements.
    dtype
        Element type.
    shard_axis
        Axis of ``shape`` that tensor parallelism splits; ``None``: every TP rank holds all.
    shard_units
        Equal units of that axis that are held like heads; ``None``: as many as its size.

    Examples
    --------
    >>> StatePart("ssm", shape=(128, 64, 128), dtype="float32", shard_axis=0).shape
    (128, 64, 128)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    shard_units: int | None = None

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            name: str,
            shape: Integers,
            dtype: str,
            shard_axis: int | None = None,
            shard_units: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        _freeze(self, "shape")


class StateGroup(msgspec.Struct, frozen=True, tag="state"):
    """Layers with a recurrent state (Mamba-like): one state per sequence slot, not per token.

    Parameters
    ----------
    layers
        Global layer indices, each at most once.
    parts
        The tensors that make up one layer's state, in registration order.

    Examples
    --------
    >>> conv = StatePart("conv", shape=(8192, 3), dtype="bfloat16", shard_axis=0)
    >>> StateGroup(layers=(0, 2, 4), parts=(conv,)).parts[0].name
    'conv'
    """

    layers: tuple[int, ...]
    parts: tuple[StatePart, ...]

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            layers: Integers,
            parts: Sequence[StatePart],
        ) -> None: ...

    def __post_init__(self) -> None:
        _freeze(self, "layers")
        _freeze(self, "parts")
        _core.check_group(self)


Group = AttentionGroup | LatentGroup | StateGroup


class ModelSpec(msgspec.Struct, frozen=True):
    """Everything a model caches: its groups, in the order in which block-id lists are given.

    Parameters
    ----------
    groups
        One entry a block-id space.
    name
        For people; never compared when engines are paired.

    Examples
    --------
    >>> model = ModelSpec(groups=(AttentionGroup(layers=range(4), num_kv_heads=8, head_dim=128),))
    >>> [group.layers for group in model.regroup([[0, 2], [1, 3]]).groups]
    [(0, 2), (1, 3)]
    """

    groups: tuple[Group, ...]
    name: str = ""

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            groups: Sequence[Group],
            name: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        _freeze(self, "groups")
        _core.check_model(self)

    @classmethod
    def from_hf_config(
        cls, config: dict[str, Any] | str | Path, *, dtype: str | None = None
    ) -> ModelSpec:
        """Read a Hugging Face ``config.json`` (a path, or the parsed dictionary).

        Parameters
        ----------
        config
            Path of a ``config.json``, or its content; of a multimodal one, its ``text_config``.
        dtype
            Element type of the cache where it differs from the weights', e.g. ``"float8_e4m3fn"``.

        Raises
        ------
        ValueError
            A key that decides the cache's shape is missing, or a layer kind is unknown.

        Examples
        --------
        >>> spec = ModelSpec.from_hf_config(
        ...     {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
        ... )
        >>> spec.groups[0].num_kv_heads, spec.groups[0].head_dim
        (4, 64)
        """
        from kvferry import _hf  # only those who read configs pay for the reader

        return _hf.read_model(config, dtype=dtype)

    def regroup(self, layer_lists: Any) -> ModelSpec:
        """Split groups further, as engines do when they give layers block-id spaces of their own.

        Parameters
        ----------
        layer_lists
            One list of layer indices a new group, in the new order. Each lies inside one present
            group, and together they name every layer once.

        Raises
        ------
        ValueError
            A list mixes groups, or a layer is left out, unknown or named twice.
        """
        rest = {id(group): set(group.layers) for group in self.groups}
        regrouped: list[Group] = []
        for layers in map(tuple, layer_lists):
            homes = [group for group in self.groups if rest[id(group)].issuperset(layers)]
            if not layers or not homes:
                raise ValueError(
                    f"layer list {layers} does not lie inside what is left of one group"
                )
            rest[id(homes[0])].difference_update(layers)
            regrouped.append(msgspec.structs.replace(homes[0], layers=layers))
        left = sorted(layer for layers in rest.values() for layer in layers)
        if left:
            raise ValueError(f"layers {left} are in no list; every layer must be named once")
        return ModelSpec(groups=tuple(regrouped), name=self.name)


class EngineSpec(msgspec.Struct, frozen=True, dict=True):
    """One engine: a model, and how its cache is cut into ranks, blocks and tensors.

    Per-group values are given once for all groups or as a tuple with one entry a group.

    Parameters
    ----------
    engine_id
        Names the engine to its peers.
    model
        What is cached.
    tokens_per_block
        Tokens that one block id covers.
    layout
        Axis letters of the tensors in memory order (see :class:`kvferry.Layout`).
    tp_size, pp_size, cp_size
        Tensor-, pipeline- and context-parallel sizes.
    cp_interleave
        Consecutive tokens that stay on one CP rank.
    pp_layers
        ``[start, end)`` layer indices a pipeline stage; required where stages are uneven.
    head_ranges
        ``(start, end)`` KV heads a TP rank, or one such split a group; ``None``: the usual split.
    null_block_id
        The id that stands for "no block"; ``None`` where the engine has none.
    physical_blocks_per_block
        Consecutive tensor blocks that one block id stands for.
    num_blocks
        Block ids lie in ``[0, num_blocks)``; ``None``: known only from the tensors.

    Raises
    ------
    ValueError
        Names the field that makes no sense.

    Examples
    --------
    >>> model = ModelSpec(groups=(AttentionGroup(layers=(0, 1), num_kv_heads=8, head_dim=64),))
    >>> engine = EngineSpec("prefill", model, tokens_per_block=16, layout="KBHND", tp_size=4)
    >>> slot = engine.tensor_slots(rank=3)[1]
    >>> slot.name, slot.layers, slot.planes, slot.shape(num_blocks=100)
    ('layers.1', (1,), ('K', 'V'), (2, 100, 2, 16, 64))
    """

    engine_id: str
    model: ModelSpec
    tokens_per_block: int | tuple[int, ...]
    layout: str | tuple[str, ...]
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    cp_interleave: int = 1
    pp_layers: tuple[tuple[int, int], ...] | None = None
    head_ranges: tuple[Any, ...] | None = None
    null_block_id: int | tuple[int | None, ...] | None = None
    physical_blocks_per_block: int | tuple[int, ...] = 1
    num_blocks: int | tuple[int | None, ...] | None = None

    if TYPE_CHECKING:  # sequences of any kind become tuples

        def __init__(
            self,
            engine_id: str,
            model: ModelSpec,
            tokens_per_block: int | Integers,
            layout: str | Sequence[str],
            tp_size: int = 1,
            pp_size: int = 1,
            cp_size: int = 1,
            cp_interleave: int = 1,
            pp_layers: Sequence[Integers] | None = None,
            head_ranges: Sequence[Any] | None = None,
            null_block_id: int | Sequence[int | None] | None = None,
            physical_blocks_per_block: int | Integers = 1,
            num_blocks: int | Sequence[int | None] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for field in (
            "tokens_per_block",
            "layout",
            "pp_layers",
            "head_ranges",
            "null_block_id",
            "physical_blocks_per_block",
            "num_blocks",
        ):
            _freeze(self, field)
        self._checked  # noqa: B018 - made at once, so that nonsense is refused here

    @cached_property
    def _checked(self) -> _core.Engine:
        """The core's own form of this spec."""
        return _core.Engine(self)

    @property
    def num_ranks(self) -> int:
        """Global ranks: ``tp_size * pp_size * cp_size``."""
        return self._checked.num_ranks

    def tensor_slots(self, rank: int) -> tuple[_core.TensorSlot, ...]:
        """Return the tensors that `rank` registers, in registration order.

        Raises
        ------
        ValueError
            `rank` is outside ``[0, num_ranks)``.
        """
        return self._checked.tensor_slots(rank)


def _freeze(struct: msgspec.Struct, field: str) -> None:
    """Turn sequences into tuples, so that specs hash, compare and travel by value."""
    msgspec.structs.force_setattr(struct, field, _frozen(getattr(struct, field)))


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple | range):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, str):
        return str(value)  # a `Layout` is a string to peers
    return _frozen(value.tolist()) if hasattr(value, "tolist") else value
