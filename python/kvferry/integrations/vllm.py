"""Helpers for connectors under the names of `vllm.distributed.kv_transfer.kv_connector.utils`.

Three functions ask the vLLM that is running, and import it when they are called; one makes torch
tensors, and imports torch then. All others know the engine's objects by their attributes only.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvferry.copy import (
    copy_blocks,
    copy_kv_blocks,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
)
from kvferry.outputs import (
    KVConnectorOutput,
    KVOutputAggregator,
    TransferTracker,
    yield_req_data,
)
from kvferry.topology import BlockIds, EngineId, EngineTransferInfo, TransferTopology

if TYPE_CHECKING:
    import torch

__all__ = [
    "BlockIds",
    "EngineId",
    "EngineTransferInfo",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "TransferTopology",
    "TransferTracker",
    "copy_blocks",
    "copy_kv_blocks",
    "get_current_attn_backend",
    "get_current_attn_backends",
    "get_kv_connector_cache_layout",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "yield_req_data",
]

# Where newer and older versions of vLLM keep the selector of attention backends.
_SELECTORS = ("vllm.v1.attention.selector", "vllm.attention.selector")


def get_kv_connector_cache_layout(vllm_config: Any = None) -> Any:
    """Return the layout that the configured connector requires, else ``"NHD"``.

    Parameters
    ----------
    vllm_config
        The engine's `VllmConfig`; `None`: the one that vLLM has set as current, if there is one.

    Returns
    -------
    str
        What the connector class's `get_required_kvcache_layout(vllm_config)` says; ``"NHD"`` where
        that is `None`, and where no connector or no engine is configured.

    Raises
    ------
    ImportError
        vLLM, or the part of it that is asked, is not there.
    """
    if vllm_config is None:
        try:
            current_config = _from_vllm("vllm.config", "get_current_vllm_config_or_none")
        except ImportError:  # a version in which there is always a current one
            current_config = _from_vllm("vllm.config", "get_current_vllm_config")
        vllm_config = current_config()
    transfer_config = getattr(vllm_config, "kv_transfer_config", None)
    if transfer_config is None:
        return "NHD"
    factory = _from_vllm("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory")
    connector = factory.get_connector_class(transfer_config)
    required = connector.get_required_kvcache_layout(vllm_config)
    return "NHD" if required is None else required


def get_current_attn_backends(
    vllm_config: Any, layer_names: Iterable[str] | None = None
) -> list[type[Any]]:
    """Return the distinct attention backends of a model's layers, in the layers' order.

    Parameters
    ----------
    vllm_config
        The engine's `VllmConfig`.
    layer_names
        Layers to look at; `None`: all. A name that is no attention layer's is passed over.

    Returns
    -------
    list
        One backend class for each `full_cls_name()`. Where the model has no such layers (it is not
        loaded yet), the one that vLLM's selector picks for it.

    Raises
    ------
    ImportError
        vLLM, or the part of it that is asked, is not there.
    """
    layers_of = _from_vllm("vllm.config", "get_layers_from_vllm_config")
    layer_class = _from_vllm(
        "vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"
    )
    layers = layers_of(vllm_config, layer_class, layer_names)
    backends: dict[Any, type[Any]] = {}
    for layer in layers.values():
        backend = layer.get_attn_backend()
        backends[backend.full_cls_name()] = backend
    return list(backends.values()) or [_selected_backend(vllm_config)]


def get_current_attn_backend(
    vllm_config: Any, layer_names: Iterable[str] | None = None
) -> type[Any]:
    """Return the first of `get_current_attn_backends`."""
    return get_current_attn_backends(vllm_config, layer_names)[0]


def _selected_backend(vllm_config: Any) -> type[Any]:
    """Return the backend that vLLM's selector picks for a model's attention."""
    newer, older = _SELECTORS
    try:
        select = _from_vllm(newer, "get_attn_backend")
    except ImportError:
        select = _from_vllm(older, "get_attn_backend")
    model, cache = vllm_config.model_config, vllm_config.cache_config
    asked = {
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "use_mla": model.use_mla,
    }
    # Versions differ in what the selector takes; what it does not take, it reads from the
    # current configuration.
    taken = inspect.signature(select).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        asked = {name: value for name, value in asked.items() if name in taken}
    current = getattr(
        import_module("vllm.config"), "set_current_vllm_config", contextlib.nullcontext
    )
    with current(vllm_config):
        backend: type[Any] = select(**asked)
    return backend


def _from_vllm(module: str, name: str) -> Any:
    """Import a name of vLLM's, or say what is missing."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{name} of {module} is needed from a running vLLM: {error}", name=module
        ) from error


def _make_src_and_dst_indices(
    src_block_ids: Iterable[int],
    dst_block_ids: Iterable[int],
    src_device: torch.device | str,
    dst_device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of both sides as int64 tensors, each on its side's device.

    Examples
    --------
    >>> source, target = _make_src_and_dst_indices([3, 1], [0, 5], "cpu", "cpu")
    >>> source.tolist(), target.tolist(), source.dtype
    ([3, 1], [0, 5], torch.int64)
    """
    import torch

    index = operator.index  # a fraction is an error, not rounded
    return (
        torch.tensor([*map(index, src_block_ids)], dtype=torch.int64, device=src_device),
        torch.tensor([*map(index, dst_block_ids)], dtype=torch.int64, device=dst_device),
    )
