"""Reads a Hugging Face ``config.json``: which layers cache what, and in which shape.

Owns the names of configuration keys. A key that is misread gives fluent garbage much later, so
whatever decides a shape is in the config, is a default of the model's own class that is listed
here, or is an error that names the key. Layers of draft models (multi-token prediction) are left
out: engines number and cache them on their own terms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.specs import AttentionGroup, Group, LatentGroup, ModelSpec, StateGroup, StatePart

Config = Mapping[str, Any]

# Where a multimodal or composite config keeps its language model.
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")

# Other spellings of a key, in the order in which they are tried.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "dtype": ("torch_dtype",),
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "mamba_num_heads": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_d_head",),
    "n_groups": ("mamba_n_groups",),
    "ssm_state_size": ("mamba_d_state",),
    "conv_kernel": ("mamba_d_conv",),
    "mamba_ssm_cache_dtype": ("mamba_ssm_dtype",),
}

# What a model's class in Transformers 5.24 (``models/*/configuration_*.py``) assumes where a
# config is silent, for the keys that saved configs leave out. A key that is ``null`` is not silent.
_GEMMA_3: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_QWEN: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_CLASS_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {**_GEMMA_3, "sliding_window": 4096, "sliding_window_pattern": 6},
    "gemma3n_text": {**_GEMMA_3, "sliding_window": 512, "sliding_window_pattern": 5}
    | {"num_key_value_heads": 2, "num_kv_shared_layers": 15},
    "gemma4_text": {**_GEMMA_3, "sliding_window": 512, "sliding_window_pattern": 6}
    | {"global_head_dim": 512},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN),
}

# The kind of layer behind each name: of lists, and of the characters of Nemotron-H's pattern
# string and the numbers of MiniMax's list. ``None`` caches nothing.
_KINDS: Final[dict[Any, str | None]] = {
    **dict.fromkeys(("full_attention", "attention", "*", 1), "full"),
    # Chunked attention sees back to the last multiple of the chunk, which no window describes.
    # As full attention a plan moves more than the chunk, never less.
    "chunked_attention": "full",
    "sliding_attention": "sliding",
    **dict.fromkeys(("mamba", "mamba2", "linear_attention", "M", 0), "state"),
    **dict.fromkeys(("mlp", "moe", "-", "E"), None),
}
_KIND_LISTS: Final = (
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_types",
    "attn_type_list",
)

# Keys that mean that layers differ in a way that only one of the lists above would tell.
_UNEVEN_PREFIXES: Final = (
    *("mamba_", "ssm_", "lru_", "linear_num_", "linear_attn_", "attn_layer_"),
    *("hybrid_layer_pattern", "cross_attention_layers", "conv_L_cache"),
)

# Keys under which layers of one kind state a geometry of their own (Gemma 4, MiMo-V2).
_OWN_GEOMETRY: Final[dict[str, dict[str, str]]] = {
    "full": {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"},
    "sliding": {key: f"swa_{key}" for key in ("num_key_value_heads", "head_dim", "v_head_dim")},
}

# Keys that, when set, ask for caches which no group here describes.
_UNREADABLE: Final = {
    "attn_config": "KV heads in a nested attention config",
    "block_configs": "a geometry of its own for each layer",
    "compress_ratios": "compressed KV entries",
    "index_topk": "a second cache, of the sparse attention's indexer",
    "is_encoder_decoder": "cross-attention to an encoder",
    "per_layer_config": "a geometry of its own for each layer",
}


def read_model(config: dict[str, Any] | str | Path, *, dtype: str | None = None) -> ModelSpec:
    """Read what the model of a Hugging Face config caches, groups ordered by their first layer.

    Parameters
    ----------
    config
        Path of a ``config.json``, or its content.
    dtype
        Element type of the attention and latent groups, where the KV cache's differs from the
        weights'. Recurrent state is not affected: engines keep it in the model's type, its SSM
        part in ``mamba_ssm_cache_dtype`` when the config states one.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file holds no JSON object, or a key that decides what is cached is missing, of no use,
        or of a kind that no group describes.

    Examples
    --------
    >>> config = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    >>> config |= {"sliding_window": 128, "sliding_window_pattern": 4}
    >>> [(group.layers, group.sliding_window) for group in read_model(config).groups]
    [((0, 1, 2), 128), ((3,), -1)]
    """
    outer = config if isinstance(config, Mapping) else _load(Path(config))
    inner = _language_model(outer)
    for key, what in _UNREADABLE.items():
        if inner.get(key):
            raise ValueError(f"{key!r} asks for {what}: give a ModelSpec with its own groups")
    inner = {**_CLASS_DEFAULTS.get(inner.get("model_type", ""), {}), **inner}
    model_dtype = _dtype(inner, "dtype") or _dtype(outer, "dtype") or "bfloat16"

    layers: dict[str, list[int]] = {}
    for layer, kind in enumerate(_layer_kinds(inner)):
        if kind is not None:
            layers.setdefault(kind, []).append(layer)
    groups: list[Group] = [
        StateGroup(tuple(of_kind), _state_parts(inner, model_dtype))
        if kind == "state"
        else _attention_group(inner, kind, tuple(of_kind), dtype or model_dtype)
        for kind, of_kind in layers.items()
    ]
    name = outer.get("_name_or_path") or outer.get("model_type") or ""
    return ModelSpec(tuple(groups), name)


def _load(path: Path) -> Config:
    try:
        # Not msgspec: published configs hold the bare word Infinity, which strict JSON refuses.
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        found = type(config).__name__
        raise ValueError(f"{path} holds a JSON {found}, not a config's object")
    return config


def _language_model(config: Config) -> Config:
    nested = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None)
    return config if nested is None else _language_model(nested)


def _layer_kinds(config: Config) -> list[str | None]:
    """Return ``"full"``, ``"sliding"``, ``"state"`` or ``None`` (caches nothing) for each layer."""
    key = next((key for key in _KIND_LISTS if config.get(key) is not None), None)
    kinds = _periodic_kinds(config) if key is None else _listed_kinds(config, key)
    windowless = not config.get("sliding_window", True) or config.get("use_sliding_window") is False
    # An engine keeps a latent cache whole, whatever its attention looks at.
    if windowless or config.get("kv_lora_rank"):
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    # The last layers of Gemma 3n and 4 attend to the keys and values of earlier ones.
    return kinds[: max(0, len(kinds) - (config.get("num_kv_shared_layers") or 0))]


def _listed_kinds(config: Config, key: str) -> list[str | None]:
    names, count = config[key], _find(config, "num_hidden_layers")
    if count is not None and count != len(names):
        raise ValueError(f"{key!r} has length {len(names)}, but 'num_hidden_layers' is {count}")
    for layer, name in enumerate(names):
        if name not in _KINDS:
            raise ValueError(
                f"layer {layer} in {key!r} is of the unknown kind {name!r}, which decides what "
                f"the layer caches; known are {', '.join(map(repr, _KINDS))}"
            )
    return [_KINDS[name] for name in names]


def _periodic_kinds(config: Config) -> list[str | None]:
    layers = range(_positive(config, "how many layers cache something", "num_hidden_layers"))
    if (attention := config.get("attn_layer_indices")) is not None:
        return ["full" if layer in attention else "state" for layer in layers]
    if config.get("full_attention_interval"):
        period = _positive(config, "which layers are recurrent", "full_attention_interval")
        return ["state" if (layer + 1) % period else "full" for layer in layers]
    uneven = next((key for key in config if key.startswith(_UNEVEN_PREFIXES)), None)
    if uneven is not None:
        raise ValueError(
            f"config has {uneven!r} but no 'layer_types', which decides what each layer caches"
        )
    if _find(config, "sliding_window_pattern"):
        period = _positive(config, "which layers see a sliding window", "sliding_window_pattern")
        return ["sliding" if (layer + 1) % period else "full" for layer in layers]
    # Qwen2's first layers see everything; where nothing is said, every layer slides, as Mistral's.
    first = (config.get("max_window_layers") or 0) if "sliding_window" in config else len(layers)
    return ["sliding" if layer >= first else "full" for layer in layers]


def _attention_group(config: Config, kind: str, layers: tuple[int, ...], dtype: str) -> Group:
    if config.get("kv_lora_rank"):
        rank = _positive(config, "the latent vector's size", "kv_lora_rank")
        rotary = _positive(config, "the latent vector's rotary part", "qk_rope_head_dim")
        return LatentGroup(layers, latent_dim=rank + rotary, dtype=dtype)

    own = _OWN_GEOMETRY[kind].items()
    config = {**config, **{key: config[name] for key, name in own if config.get(name)}}

    def size(*keys: str) -> int:
        return _positive(config, "the shape of the KV cache", *keys)

    if _find(config, "head_dim") is None:
        head_dim = size("hidden_size") // size("num_attention_heads")
    else:
        head_dim = size("head_dim")
    # Falcon's first configs state a number of KV heads even where all queries share one.
    shares_one = config.get("multi_query") and not config.get("new_decoder_architecture")
    v_head_dim = head_dim if config.get("v_head_dim") is None else size("v_head_dim")
    return AttentionGroup(
        layers,
        num_kv_heads=1 if shares_one else size("num_key_value_heads", "num_attention_heads"),
        head_dim=head_dim,
        dtype=dtype,
        v_head_dim=None if v_head_dim == head_dim else v_head_dim,
        sliding_window=size("sliding_window") if kind == "sliding" else -1,
    )


def _state_parts(config: Config, dtype: str) -> tuple[StatePart, ...]:
    """Return the state of a Mamba2 or gated delta net layer, shaped as vLLM's calculator shapes it.

    The projections that share a convolution are parts of their own: tensor parallelism splits
    each of them by its own heads or groups.
    """

    def size(key: str) -> int:
        return _positive(config, "the shape of a recurrent layer's state", key)

    if config.get("linear_num_value_heads") is not None:
        heads, head_dim = size("linear_num_value_heads"), size("linear_value_head_dim")
        keys, state_dim = size("linear_num_key_heads"), size("linear_key_head_dim")
        kernel = size("linear_conv_kernel_dim")
        convolved = [("Q", keys, state_dim), ("K", keys, state_dim), ("V", heads, head_dim)]
    else:
        heads, groups = size("mamba_num_heads"), size("n_groups")
        if _find(config, "mamba_head_dim") == "auto":
            head_dim = (config.get("mamba_expand") or 2) * size("hidden_size") // heads
        else:
            head_dim = size("mamba_head_dim")
        state_dim, kernel = size("ssm_state_size"), size("conv_kernel")
        convolved = [("x", heads, head_dim), ("B", groups, state_dim), ("C", groups, state_dim)]
    parts = [
        StatePart(
            f"conv_{name}", (units * width, kernel - 1), dtype, shard_axis=0, shard_units=units
        )
        for name, units, width in convolved
    ]
    ssm_dtype = _dtype(config, "mamba_ssm_cache_dtype") or dtype
    return (*parts, StatePart("ssm", (heads, head_dim, state_dim), ssm_dtype, shard_axis=0))


def _spellings(*keys: str) -> list[str]:
    return [name for key in keys for name in (key, *_ALIASES.get(key, ()))]


def _find(config: Config, *keys: str) -> Any:
    """Return the value of the first of `keys`, in any spelling, that has one, else ``None``."""
    return next((config[name] for name in _spellings(*keys) if config.get(name) is not None), None)


def _dtype(config: Config, key: str) -> str | None:
    """Return an element type's name, ``None`` where the config leaves it to the engine."""
    name = str(_find(config, key)).removeprefix("torch.")
    return None if name in ("None", "auto") else name


def _positive(config: Config, decides: str, *keys: str) -> int:
    value = _find(config, *keys)
    if value is None:
        names = " or ".join(map(repr, _spellings(*keys)))
        raise ValueError(f"config has no {names}, which decides {decides}")
    if type(value) is not int or value <= 0:
        raise ValueError(f"{keys[0]!r} is {value!r}, not a positive integer; it decides {decides}")
    return value
