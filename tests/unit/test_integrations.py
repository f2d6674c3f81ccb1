"""The names of the two systems that kvferry stands in for, and what is asked of a running vLLM."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import kvferry.copy
import kvferry.groups
import kvferry.outputs
import kvferry.topology
from kvferry.integrations import lmcache, vllm

# What programs import from the two modules, as far as the contract has it.
GROUP_VIEW = [
    "EngineGroupInfo",
    "_engine_group_id_per_view",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "get_engine_group_indices",
    "num_engine_group_infos",
    "num_engine_groups",
    "slice_block_ids_per_group",
]
CONNECTOR_UTILS = [
    "BlockIds",
    "EngineId",
    "EngineTransferInfo",
    "KVOutputAggregator",
    "TransferTopology",
    "_make_src_and_dst_indices",
    "copy_kv_blocks",
    "get_current_attn_backend",
    "get_current_attn_backends",
    "get_kv_connector_cache_layout",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "yield_req_data",
]


@pytest.mark.parametrize(
    ("module", "names", "own"),
    [
        (lmcache, GROUP_VIEW, [kvferry.groups]),
        (vllm, CONNECTOR_UTILS, [kvferry.copy, kvferry.outputs, kvferry.topology]),
    ],
)
def test_the_names_are_there_and_mean_kvferry_s(module, names, own):
    assert [name for name in names if not hasattr(module, name)] == []
    origins = {name: source for source in own for name in source.__all__ if name in names}
    assert len(origins) >= 7
    assert [n for n in origins if getattr(module, n) is not getattr(origins[n], n)] == []
    assert lmcache._engine_group_id_per_view is kvferry.groups.engine_group_ids_per_view


def test_neither_imports_a_framework_or_the_system_itself():
    code = """
import sys, kvferry.integrations.lmcache, kvferry.integrations.vllm
print(*{"torch", "vllm", "lmcache"} & set(sys.modules))
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("ids", [[], [3, 1, 3], range(4), (1 << 40, 0)])
def test_indices_are_two_int64_tensors(ids):
    torch = pytest.importorskip("torch")
    source, target = vllm._make_src_and_dst_indices(ids, [7], "cpu", torch.device("cpu"))
    assert (source.tolist(), target.tolist()) == (list(ids), [7])
    assert {source.dtype, target.dtype} == {torch.int64}
    with pytest.raises(TypeError):
        vllm._make_src_and_dst_indices([0.5], [7], "cpu", "cpu")


class Backend:
    @classmethod
    def full_cls_name(cls):
        return cls.__name__


class OtherBackend(Backend):
    pass


class Connector:
    """A connector that needs the layout its configuration names."""

    @classmethod
    def get_required_kvcache_layout(cls, config):
        return config.needed


def config(dtype="bfloat16", cache_dtype="auto", use_mla=False, **fields):
    """Return what is read of a `VllmConfig`."""
    model = SimpleNamespace(get_head_size=lambda: 128, dtype=dtype, use_mla=use_mla)
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=16)
    return SimpleNamespace(model_config=model, cache_config=cache, layers={}, **fields)


@pytest.fixture
def running(monkeypatch):
    """Put stand-ins for the parts of vLLM in place; return them by name."""

    class AttentionLayerBase:
        pass

    def layers_of(vllm_config, kind, names=None):
        assert kind is AttentionLayerBase
        layers = vllm_config.layers
        return {name: layers[name] for name in (layers if names is None else names)}

    class Factory:
        get_connector_class = staticmethod(lambda transfer_config: transfer_config)

    contents = {
        "vllm.config": {
            "get_layers_from_vllm_config": layers_of,
            "get_current_vllm_config": lambda: config(kv_transfer_config=None),
        },
        "vllm.model_executor.layers.attention_layer_base": {
            "AttentionLayerBase": AttentionLayerBase
        },
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory},
    }
    modules = {}
    for name, members in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(members)
        monkeypatch.setitem(sys.modules, name, modules[name])
    for name in vllm._SELECTORS:
        monkeypatch.setitem(sys.modules, name, None)
    return modules


def test_the_connector_s_layout_else_the_token_major_one(running):
    def configured(needed):
        return config(kv_transfer_config=Connector, needed=needed)

    assert vllm.get_kv_connector_cache_layout(configured("HND")) == "HND"
    assert vllm.get_kv_connector_cache_layout(configured(None)) == "NHD"
    assert vllm.get_kv_connector_cache_layout(config(kv_transfer_config=None)) == "NHD"
    assert vllm.get_kv_connector_cache_layout() == "NHD"
    running["vllm.config"].get_current_vllm_config = lambda: configured("HND")
    assert vllm.get_kv_connector_cache_layout() == "HND"
    running["vllm.config"].get_current_vllm_config_or_none = lambda: None
    assert vllm.get_kv_connector_cache_layout() == "NHD"


def test_backends_come_once_each_in_the_layers_order(running):
    engine = config()
    kinds = {"0": OtherBackend, "1": Backend, "2": OtherBackend}
    for name, kind in kinds.items():
        engine.layers[name] = SimpleNamespace(get_attn_backend=lambda kind=kind: kind)
    assert vllm.get_current_attn_backends(engine) == [OtherBackend, Backend]
    assert vllm.get_current_attn_backends(engine, ["1"]) == [Backend]
    assert vllm.get_current_attn_backend(engine) is OtherBackend


def test_backends_of_one_name_are_one(running):
    """Engines make classes on the fly: the name says which are alike, not the class."""

    def made():
        return type("Made", (Backend,), {})

    engine = config()
    kinds = {"0": made(), "1": Backend, "2": made()}
    for name, kind in kinds.items():
        engine.layers[name] = SimpleNamespace(get_attn_backend=lambda kind=kind: kind)
    backends = vllm.get_current_attn_backends(engine)
    # In the place of the first, the class of the last, as vLLM has it.
    assert backends == [kinds["2"], Backend]
    assert vllm.get_current_attn_backends(engine, ["0", "1"]) == [kinds["0"], Backend]


@pytest.mark.parametrize("module", vllm._SELECTORS)
@pytest.mark.parametrize("takes_block_size", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        {"dtype": "bfloat16", "cache_dtype": "auto", "use_mla": False},
        {"dtype": "float16", "cache_dtype": "fp8_e4m3", "use_mla": True},
    ],
    ids=["usual", "latent"],
)
def test_the_selector_is_asked_what_its_version_takes(
    running, monkeypatch, module, takes_block_size, said
):
    asked = {}
    current = []

    @contextlib.contextmanager
    def set_current_vllm_config(vllm_config):
        current.append(vllm_config)
        yield
        current.pop()

    def selected(**arguments):
        asked.update(arguments, is_current=current == [engine])
        return Backend

    def newer(head_size, dtype, kv_cache_dtype, use_mla=False):
        return selected(
            head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype, use_mla=use_mla
        )

    def older(head_size, dtype, kv_cache_dtype, block_size, use_mla=False):
        return newer(head_size, dtype, kv_cache_dtype, use_mla) and selected(block_size=block_size)

    engine = config(**said)
    running["vllm.config"].set_current_vllm_config = set_current_vllm_config
    selector = ModuleType(module)
    selector.get_attn_backend = older if takes_block_size else newer
    monkeypatch.setitem(sys.modules, module, selector)
    assert vllm.get_current_attn_backends(engine) == [Backend]
    asked_of_all = {
        "head_size": 128,
        "dtype": said["dtype"],
        "kv_cache_dtype": said["cache_dtype"],
        "use_mla": said["use_mla"],
        "is_current": True,
    }
    assert asked == asked_of_all | ({"block_size": 16} if takes_block_size else {})
    assert current == []


def test_without_vllm_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    for ask in (vllm.get_current_attn_backends, vllm.get_current_attn_backend):
        with pytest.raises(ImportError, match=r"get_layers_from_vllm_config of vllm\.config"):
            ask(config())
    with pytest.raises(ImportError, match=r"get_current_vllm_config of vllm\.config"):
        vllm.get_kv_connector_cache_layout()


def test_a_part_that_a_version_lacks_is_named(running):
    with pytest.raises(ImportError, match=r"get_attn_backend of vllm\.attention\.selector"):
        vllm.get_current_attn_backends(config())
    del running["vllm.config"].get_layers_from_vllm_config
    with pytest.raises(ImportError, match=r"get_layers_from_vllm_config of vllm\.config"):
        vllm.get_current_attn_backends(config())
