"""What is asked of a running vLLM: the connector's layout and the attention backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils as theirs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvferry.integrations import vllm as ours

MODEL = Path(__file__).parents[2] / "data/tiny-llama"


@pytest.fixture(scope="module")
def engine():
    """Return the configuration of an engine on this machine's CPU."""
    arguments = EngineArgs(
        model=str(MODEL),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
    )
    return arguments.create_engine_config()


class Backend:
    @classmethod
    def full_cls_name(cls):
        return cls.__module__, cls.__qualname__


class OtherBackend(Backend):
    pass


class Layer(AttentionLayerBase):
    def __init__(self, backend):
        self.backend = backend

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        return None


def test_the_selector_s_backend_stands_in_for_layers_that_are_not_there(engine):
    expected = theirs.get_current_attn_backends(engine)
    assert len(expected) == 1
    assert ours.get_current_attn_backends(engine) == expected
    assert ours.get_current_attn_backend(engine) is theirs.get_current_attn_backend(engine)


@pytest.mark.parametrize("names", [None, [], ["2"], ["3", "1"], ["2", "unknown", "0"]])
def test_layers_backends_come_once_each_in_order(engine, monkeypatch, names):
    layers = dict(zip("0123", map(Layer, (Backend, OtherBackend, Backend, Backend)), strict=True))
    context = {**layers, "no layer": object()}
    monkeypatch.setattr(engine.compilation_config, "static_forward_context", context)
    assert ours.get_current_attn_backends(engine, names) == theirs.get_current_attn_backends(
        engine, names
    )
    assert ours.get_current_attn_backend(engine, names) is theirs.get_current_attn_backend(
        engine, names
    )


@pytest.mark.parametrize(
    ("connector", "layout"), [("NixlConnector", "LBHNC"), ("ExampleConnector", None)]
)
def test_the_connector_says_which_layout_it_needs(engine, monkeypatch, connector, layout):
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    monkeypatch.setattr(engine, "kv_transfer_config", transfer)
    assert theirs.get_kv_connector_cache_layout(engine) == layout
    assert ours.get_kv_connector_cache_layout(engine) == (layout or "NHD")
    with set_current_vllm_config(engine):
        assert theirs.get_kv_connector_cache_layout() == layout
        assert ours.get_kv_connector_cache_layout() == (layout or "NHD")


def test_without_a_connector_there_is_the_token_major_layout(engine):
    assert theirs.get_kv_connector_cache_layout(engine) is None
    assert theirs.get_kv_connector_cache_layout() is None
    assert ours.get_kv_connector_cache_layout(engine) == "NHD"
    assert ours.get_kv_connector_cache_layout() == "NHD"
