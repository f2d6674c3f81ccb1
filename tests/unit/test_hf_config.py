"""Reading a Hugging Face config: exact groups of real models, every rule, every refusal."""

import json
from pathlib import Path

import pytest

from kvferry.specs import AttentionGroup, LatentGroup, ModelSpec, StateGroup, StatePart

MODELS = Path(__file__).parents[1] / "data" / "models"

# A dense decoder of 6 layers; the tests below state only what differs.
DENSE = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def read(*dropped, **changes):
    config = {key: value for key, value in DENSE.items() if key not in dropped} | changes
    return ModelSpec.from_hf_config(config).groups


def windows(*dropped, **changes):
    """Return layer → sliding window, of every layer that caches keys and values."""
    groups = read(*dropped, **changes)
    return dict(sorted((layer, group.sliding_window) for group in groups for layer in group.layers))


GEMMA_FULL = tuple(range(5, 62, 6))
GEMMA_SLIDING = tuple(layer for layer in range(62) if layer not in GEMMA_FULL)
NEMOTRON_ATTENTION = (7, 18, 29, 40)
NEMOTRON_MAMBA = (
    *(0, 2, 4, 6, 9, 11, 13, 15, 17, 20, 22, 24, 26),
    *(28, 31, 33, 35, 37, 39, 42, 44, 46, 48, 50),
)
NEMOTRON_PARTS = (
    StatePart("conv_x", (8192, 3), "bfloat16", shard_axis=0, shard_units=128),
    StatePart("conv_B", (1024, 3), "bfloat16", shard_axis=0, shard_units=8),
    StatePart("conv_C", (1024, 3), "bfloat16", shard_axis=0, shard_units=8),
    StatePart("ssm", (128, 64, 128), "bfloat16", shard_axis=0),
)
EXPECTED = {
    "deepseek-v3": ("deepseek_v3", [LatentGroup(range(61), latent_dim=576)]),
    "gemma-3-27b": (
        "gemma3",
        [
            AttentionGroup(GEMMA_SLIDING, num_kv_heads=16, head_dim=128, sliding_window=1024),
            AttentionGroup(GEMMA_FULL, num_kv_heads=16, head_dim=128),
        ],
    ),
    "gpt-oss-120b": (
        "gpt_oss",
        [
            AttentionGroup(range(0, 36, 2), num_kv_heads=8, head_dim=64, sliding_window=128),
            AttentionGroup(range(1, 36, 2), num_kv_heads=8, head_dim=64),
        ],
    ),
    "llama-3.1-70b": ("llama", [AttentionGroup(range(80), num_kv_heads=8, head_dim=128)]),
    "llama-3.1-8b": ("llama", [AttentionGroup(range(32), num_kv_heads=8, head_dim=128)]),
    "nemotron-h-8b": (
        "nemotron_h",
        [
            StateGroup(NEMOTRON_MAMBA, NEMOTRON_PARTS),
            AttentionGroup(NEMOTRON_ATTENTION, num_kv_heads=8, head_dim=128),
        ],
    ),
    "qwen2.5-7b": ("qwen2", [AttentionGroup(range(28), num_kv_heads=4, head_dim=128)]),
}


@pytest.mark.parametrize("model", EXPECTED)
def test_published_models(model):
    name, groups = EXPECTED[model]
    assert ModelSpec.from_hf_config(MODELS / f"{model}.json") == ModelSpec(tuple(groups), name)


def test_every_model_file_has_an_expectation():
    assert {path.stem for path in MODELS.glob("*.json")} == set(EXPECTED)


def test_gemma_counts():
    assert (len(GEMMA_SLIDING), len(GEMMA_FULL), GEMMA_FULL[-1]) == (52, 10, 59)


def test_a_path_may_be_a_string_and_a_config_a_dict():
    path = MODELS / "gpt-oss-120b.json"
    expected = ModelSpec.from_hf_config(path)
    assert ModelSpec.from_hf_config(str(path)) == expected
    assert ModelSpec.from_hf_config(json.loads(path.read_text())) == expected


def test_the_config_is_left_alone():
    config = {"model_type": "gemma2", **DENSE}
    before = json.dumps(config)
    ModelSpec.from_hf_config(config)
    assert json.dumps(config) == before


def test_name_prefers_the_repository():
    config = {**DENSE, "model_type": "llama"}
    assert ModelSpec.from_hf_config(config).name == "llama"
    assert ModelSpec.from_hf_config(config | {"_name_or_path": "org/model"}).name == "org/model"
    assert ModelSpec.from_hf_config(DENSE).name == ""


# Element types


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": "auto"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype(keys, dtype):
    assert read(**keys)[0].dtype == dtype


def test_dtype_of_the_cache_spares_recurrent_state():
    state, attention = ModelSpec.from_hf_config(
        MODELS / "nemotron-h-8b.json", dtype="float8_e4m3fn"
    ).groups
    assert attention.dtype == "float8_e4m3fn"
    assert state.parts == NEMOTRON_PARTS
    (latent,) = ModelSpec.from_hf_config(MODELS / "deepseek-v3.json", dtype="uint8").groups
    assert latent.dtype == "uint8"


@pytest.mark.parametrize(
    ("outer", "inner", "dtype"),
    [
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({}, {"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, {"dtype": "float16"}, "float16"),
        ({"dtype": "float16"}, {"dtype": None}, "float16"),
        ({"dtype": "float16"}, {"dtype": "auto"}, "float16"),
    ],
)
def test_dtype_of_a_multimodal_config_may_stand_at_either_level(outer, inner, dtype):
    config = {
        "model_type": "some_vlm",
        "hidden_size": 99,
        **outer,
        "text_config": {**DENSE, **inner},
    }
    spec = ModelSpec.from_hf_config(config)
    assert spec.name == "some_vlm"
    assert spec.groups == (AttentionGroup(range(6), num_kv_heads=2, head_dim=64, dtype=dtype),)


def test_nested_twice():
    config = {"thinker_config": {"text_config": DENSE}}
    assert ModelSpec.from_hf_config(config).groups == read()


# Heads


@pytest.mark.parametrize(
    ("dropped", "changes", "heads", "head_dim"),
    [
        ((), {}, 2, 64),
        (("num_key_value_heads",), {}, 8, 64),
        ((), {"num_key_value_heads": None}, 8, 64),
        ((), {"head_dim": 128}, 2, 128),
        ((), {"head_dim": None}, 2, 64),
        ((), {"attention_head_dim": 96}, 2, 96),
        (("num_attention_heads", "hidden_size"), {"head_dim": 32}, 2, 32),
        ((), {"model_type": "gemma"}, 2, 256),
        ((), {"model_type": "gemma2"}, 2, 256),
        ((), {"model_type": "gemma", "head_dim": 64}, 2, 64),
        (("num_attention_heads", "num_key_value_heads"), {"model_type": "gemma3_text"}, 4, 256),
        ((), {"model_type": "falcon", "multi_query": True, "num_kv_heads": 8}, 1, 64),
        (
            ("num_key_value_heads",),
            {"multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True},
            8,
            64,
        ),
    ],
)
def test_heads(dropped, changes, heads, head_dim):
    group = read(*dropped, **changes)[0]
    assert (group.num_kv_heads, group.head_dim) == (heads, head_dim)


def test_gpt2_spellings():
    groups = ModelSpec.from_hf_config({"n_layer": 12, "n_embd": 768, "n_head": 12}).groups
    assert groups == (AttentionGroup(range(12), num_kv_heads=12, head_dim=64),)


def test_values_of_another_size_than_keys():
    assert read(head_dim=192, v_head_dim=128)[0].v_head_dim == 128
    assert read(v_head_dim=64)[0].v_head_dim is None


def test_kinds_may_have_a_geometry_of_their_own():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    sliding, full = read(
        layer_types=kinds,
        sliding_window=32,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=1,
    )
    assert sliding == AttentionGroup(range(5), 2, 256, sliding_window=32)
    assert full == AttentionGroup((5,), 1, 512)
    sliding, full = read(layer_types=kinds, sliding_window=32, swa_num_key_value_heads=8)
    assert (sliding.num_kv_heads, full.num_kv_heads) == (8, 2)


def test_latent_attention_with_a_window_is_cached_whole():
    kinds = ["sliding_attention", "full_attention"] * 3
    groups = read(kv_lora_rank=64, qk_rope_head_dim=16, sliding_window=32, layer_types=kinds)
    assert groups == (LatentGroup(range(6), latent_dim=80),)


def test_no_lora_rank_is_ordinary_attention():
    assert read(kv_lora_rank=None) == read()


# Sliding windows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [-1] * 6),
        ({"sliding_window": None}, [-1] * 6),
        ({"sliding_window": 0}, [-1] * 6),
        ({"sliding_window": 32}, [32] * 6),
        ({"model_type": "mistral", "sliding_window": None}, [-1] * 6),
        ({"sliding_window": 32, "use_sliding_window": False}, [-1] * 6),
        ({"sliding_window": 32, "use_sliding_window": True}, [32] * 6),
        ({"sliding_window": 32, "sliding_window_pattern": 3}, [32, 32, -1] * 2),
        ({"sliding_window": 32, "_sliding_window_pattern": 2}, [32, -1] * 3),
        ({"sliding_window": 32, "sliding_window_pattern": 1}, [-1] * 6),
        ({"sliding_window": None, "sliding_window_pattern": 3}, [-1] * 6),
        ({"sliding_window": 32, "global_attn_every_n_layers": 3}, [32, 32, -1] * 2),
        ({"sliding_window": 32, "max_window_layers": 4}, [-1] * 4 + [32] * 2),
        ({"sliding_window": 32, "max_window_layers": 6}, [-1] * 6),
        ({"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 4}, [-1] * 6),
        (
            {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 4}
            | {"use_sliding_window": True},
            [-1] * 4 + [32] * 2,
        ),
        ({"model_type": "gemma2", "sliding_window": 32}, [32, -1] * 3),
        ({"model_type": "gemma2"}, [4096, -1] * 3),
        ({"model_type": "gemma3_text", "sliding_window": 32}, [32] * 5 + [-1]),
        ({"model_type": "gpt_oss"}, [128, -1] * 3),
        ({"model_type": "cohere2", "sliding_window": 32}, [32, 32, 32, -1, 32, 32]),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 32}
            | {"sliding_window_pattern": 6, "max_window_layers": 0},
            [-1, 32] * 3,
        ),
        (
            {"layer_types": ["sliding_attention"] * 6, "sliding_window": 32}
            | {"use_sliding_window": False},
            [-1] * 6,
        ),
        ({"layer_types": ["sliding_attention"] * 6, "sliding_window": None}, [-1] * 6),
        ({"layer_types": ["chunked_attention", "full_attention"] * 3}, [-1] * 6),
        ({"attn_type_list": [1] * 6}, [-1] * 6),
    ],
)
def test_windows(changes, expected):
    assert windows(**changes) == dict(enumerate(expected))


def test_layers_with_the_same_cache_are_one_group():
    assert len(read(layer_types=["chunked_attention", "full_attention"] * 3)) == 1
    assert len(read(sliding_window=32, sliding_window_pattern=2)) == 2


def test_layers_that_share_anothers_cache_have_none():
    assert windows(num_kv_shared_layers=2) == dict.fromkeys(range(4), -1)


def test_groups_come_in_the_order_of_their_first_layer():
    kinds = ["full_attention", *["sliding_attention"] * 5]
    assert [group.layers[0] for group in read(layer_types=kinds, sliding_window=32)] == [0, 1]
    assert [group.layers[0] for group in read(layer_types=kinds[::-1], sliding_window=32)] == [0, 5]


def test_the_number_of_layers_may_be_left_to_the_list():
    assert windows("num_hidden_layers", layer_types=["full_attention"] * 3) == {0: -1, 1: -1, 2: -1}


# Recurrent state

MAMBA = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 4,
    "conv_kernel": 4,
}
MAMBA_PARTS = (
    StatePart("conv_x", (128, 3), "bfloat16", shard_axis=0, shard_units=16),
    StatePart("conv_B", (8, 3), "bfloat16", shard_axis=0, shard_units=2),
    StatePart("conv_C", (8, 3), "bfloat16", shard_axis=0, shard_units=2),
    StatePart("ssm", (16, 8, 4), "bfloat16", shard_axis=0),
)


@pytest.mark.parametrize(
    "kinds",
    [
        {"hybrid_override_pattern": "M-*EM-"},
        {"layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "mlp"]},
        {"layer_types": ["mamba2", "mlp", "full_attention", "moe", "mamba2", "mlp"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "moe", "mamba", "moe"]},
    ],
)
def test_hybrid_layers(kinds):
    state, attention = read(**MAMBA, **kinds)
    assert state == StateGroup((0, 4), MAMBA_PARTS)
    assert attention == AttentionGroup((2,), num_kv_heads=2, head_dim=64)


def test_attention_layers_by_index():
    state, attention = read(**MAMBA, attn_layer_indices=[2, 3])
    assert (state.layers, attention.layers) == ((0, 1, 4, 5), (2, 3))


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        ("mamba_ssm_cache_dtype", "float32", "float32"),
        ("mamba_ssm_cache_dtype", "auto", "float16"),
        ("mamba_ssm_dtype", "float32", "float32"),
        ("unrelated", None, "float16"),
    ],
)
def test_ssm_state_may_have_a_type_of_its_own(key, value, dtype):
    keys = MAMBA | {"dtype": "float16", key: value}
    (state,) = read(**keys, hybrid_override_pattern="MMMMMM")
    assert [part.dtype for part in state.parts] == ["float16"] * 3 + [dtype]


def test_other_spellings_of_mamba():
    keys = {"mamba_n_heads": 16, "mamba_d_head": "auto", "mamba_expand": 1, "mamba_n_groups": 2}
    keys |= {"mamba_d_state": 4, "mamba_d_conv": 4, "hidden_size": 128}
    (state,) = read(**keys, layer_types=["mamba"] * 6)
    assert state == StateGroup(range(6), MAMBA_PARTS)


def test_gated_delta_net():
    keys = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4}
    keys |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "full_attention_interval": 3}
    state, attention = read(**keys)
    assert attention.layers == (2, 5)
    assert state == StateGroup(
        (0, 1, 3, 4),
        (
            StatePart("conv_Q", (64, 3), "bfloat16", shard_axis=0, shard_units=4),
            StatePart("conv_K", (64, 3), "bfloat16", shard_axis=0, shard_units=4),
            StatePart("conv_V", (256, 3), "bfloat16", shard_axis=0, shard_units=8),
            StatePart("ssm", (8, 32, 16), "bfloat16", shard_axis=0),
        ),
    )


# Refusals: each names the key and what it decides.


@pytest.mark.parametrize(
    ("dropped", "changes", "message"),
    [
        ("num_hidden_layers", {}, "no 'num_hidden_layers'.* decides how many layers"),
        ("hidden_size", {}, "no 'hidden_size'.* decides the shape of the KV cache"),
        ("num_attention_heads", {}, "no 'num_attention_heads'.* decides the shape"),
        ("", {"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ("", {"head_dim": "64"}, "'head_dim' is '64', not a positive integer"),
        ("", {"sliding_window": -5}, "'sliding_window' is -5"),
        ("", {"sliding_window": 32, "sliding_window_pattern": "LLLG"}, "pattern' is 'LLLG'"),
        ("", {"sliding_window_pattern": 2}, "no 'sliding_window'.* decides"),
        ("", {"layer_types": ["sliding_attention"] * 6}, "no 'sliding_window'.* decides"),
        ("", {"layer_types": ["full_attention"] * 5}, "has length 5, but .*layers' is 6"),
        ("", {"hybrid_override_pattern": "M*M"}, "has length 3, but 'num_hidden_layers' is 6"),
        ("", {"layer_types": ["full_attention"] * 5 + ["hybrid"]}, "layer 5 .* kind 'hybrid'"),
        ("", {"hybrid_override_pattern": "*****?"}, "layer 5 in 'hybrid_override_pattern'"),
        ("", {"layer_types": ["mamba"] * 6}, "no 'mamba_num_heads' or 'mamba_n_heads'.* state"),
        ("", {"kv_lora_rank": 64}, "no 'qk_rope_head_dim'.* rotary part"),
        ("", MAMBA, "'mamba_num_heads' but no 'layer_types', which decides what each layer"),
        ("", {"attn_layer_period": 8}, "'attn_layer_period' but no 'layer_types'"),
        ("", {"index_topk": 2048}, "'index_topk' asks for a second cache"),
        ("", {"is_encoder_decoder": True}, "'is_encoder_decoder' asks for cross-attention"),
        ("", {"dtype": "int3"}, "int3"),
    ],
)
def test_refusals(dropped, changes, message):
    with pytest.raises(ValueError, match=message):
        read(dropped, **changes)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no/such/config\.json"):
        ModelSpec.from_hf_config("no/such/config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"\xff{}", "is not JSON"), (b"[1]", "holds a JSON list")],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        ModelSpec.from_hf_config(path)


def test_infinity_is_read_as_publishers_write_it(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text()
    assert ModelSpec.from_hf_config(path).groups == read()
