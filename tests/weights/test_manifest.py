import copy
import math
from collections import Counter

import pytest
import torch

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.manifest import account, manifest_from_config
from tercel.weights.published import NAMES, TOTAL_BYTES, published_config
from tercel.weights.tiny import FAMILIES

EXPERT_BYTES = 3 * 3072 * 3584 // 2 * 17 // 16
"""Three matrices of four bits per value and a scale byte per 32."""


def test_published_k3_exactly():
    manifest = manifest_from_config(published_config("kimi_k3_mxfp4"))
    assert (manifest.num_tensors, manifest.num_bytes) == (497_220, TOTAL_BYTES["kimi_k3_mxfp4"])
    assert len({entry.key for entry in manifest.entries}) == 497_220
    assert {part: group["tensors"] for part, group in manifest.by("part").items()} == {
        "text model": 497_052,
        "vision tower": 27 * 6 + 3,
        "vision projector": 3,
    }
    by_key = {entry.key: entry for entry in manifest.entries}
    A_log = by_key["language_model.model.layers.0.self_attn.A_log"]
    assert (A_log.shape, A_log.dtype, A_log.used) == ((128,), "F32", 96)
    packed = by_key["language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_packed"]
    assert (packed.shape, packed.field) == ((3584, 1536), "layers.92.mlp.experts.w2")
    assert by_key["vision_tower.encoder.blocks.26.wqkv.weight"].shape == (4608, 1024)


def test_published_k3_with_fewer_layers_and_other_experts():
    full = published_config("kimi_k3_mxfp4")
    base = small(full, layers=8, experts=4)
    more_experts = small(full, layers=8, experts=6)
    assert more_experts.num_tensors - base.num_tensors == 7 * 2 * 6
    router = 2 * (7168 * 2 + 4)
    assert more_experts.num_bytes - base.num_bytes == 7 * (2 * EXPERT_BYTES + router)
    more_layers = small(full, layers=9, experts=4)  # one more KDA layer
    assert more_layers.num_tensors - base.num_tensors == 14 + 6 + 8 + 4 * 6


def small(config, layers, experts):
    config = copy.deepcopy(config)
    text = config["text_config"]
    text.update(num_hidden_layers=layers, num_experts=experts)
    linear = text["linear_attn_config"]
    for name in ("full_attn_layers", "kda_layers"):
        linear[name] = [layer for layer in linear[name] if layer <= layers]
    return manifest_from_config(config)


@pytest.fixture(scope="module")
def k3_nvfp4():
    return manifest_from_config(published_config("kimi_k3_nvfp4"))


@pytest.fixture(scope="module")
def by_key(k3_nvfp4):
    return {entry.key: entry for entry in k3_nvfp4.entries}


def test_published_k3_nvfp4(k3_nvfp4):
    """No byte total of it is known. How many values the hub lists per dtype, block scales left
    out, in billions to two places, is what comes out here."""
    assert k3_nvfp4.num_tensors == 992_508
    assert k3_nvfp4.num_bytes == 1_609_777_087_808
    values: Counter[str] = Counter()
    for entry in k3_nvfp4.entries:
        if not entry.key.endswith(".weight_scale"):
            values[entry.dtype] += math.prod(entry.shape)
    billions = {dtype: round(count / 1e9, 2) for dtype, count in values.items()}
    assert billions == {"F8_E4M3": 36.18, "BF16": 21.0, "F32": 0.01, "U8": 1361.37}
    assert "kimi_k3_nvfp4" not in TOTAL_BYTES


@pytest.mark.parametrize(
    ("key", "shape", "dtype", "field"),
    [
        ("3.block_sparse_moe.experts.7.w1.weight", (3072, 1792), "U8", "experts.w13"),
        ("3.block_sparse_moe.experts.7.w3.weight_scale", (3072, 224), "F8_E4M3", "w13_scale"),
        ("3.block_sparse_moe.experts.7.w2.weight_scale", (3584, 192), "F8_E4M3", "w2_scale"),
        ("3.block_sparse_moe.experts.7.w2.weight_scale_2", (), "F32", "w2_scale_2"),
        ("3.block_sparse_moe.experts.7.w2.input_scale", (), "F32", None),
        ("3.self_attn.kv_b_proj.weight", (24576, 512), "F8_E4M3", "w_k, layers.3.attention.w_v"),
        ("3.self_attn.kv_b_proj.weight_scale", (192, 1, 4, 1), "F32", "layers.3.attention.w_k"),
        ("3.self_attn.kv_a_proj_with_mqa.weight_scale", (5, 1, 56, 1), "F32", "attention.proj"),
        ("0.self_attn.b_proj.weight_scale", (1, 1, 56, 1), "F32", "attention.proj"),
        ("0.self_attn.f_b_proj.weight", (12288, 128), "F8_E4M3", "attention.f_b"),
        ("0.self_attn.q_conv1d.weight", (12288, 1, 4), "F32", "attention.conv"),
        ("0.self_attn.o_proj.weight_scale", (56, 1, 96, 1), "F32", "attention.o_proj"),
        ("0.mlp.gate_proj.weight", (33792, 7168), "BF16", "mlp.gate_up"),
        ("3.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), "BF16", "gate_up"),
        ("3.block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584), "BF16", "mlp.up"),
    ],
)
def test_tensors_of_k3_nvfp4(by_key, key, shape, dtype, field):
    entry = by_key[f"language_model.model.layers.{key}"]
    assert (entry.shape, entry.dtype) == (shape, dtype)
    assert entry.field is None if field is None else field in entry.field


@pytest.fixture(scope="module")
def kimi_linear():
    return manifest_from_config(published_config("kimi_linear_48b"))


@pytest.mark.parametrize(
    ("key", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", (163840, 2304), "BF16"),
        ("lm_head.weight", (163840, 2304), "BF16"),
        ("model.layers.0.self_attn.A_log", (1, 1, 32, 1), "F32"),
        ("model.layers.0.self_attn.g_a_proj.weight", (128, 2304), "BF16"),
        ("model.layers.0.self_attn.g_b_proj.weight", (4096, 128), "BF16"),
        ("model.layers.0.self_attn.q_conv1d.weight", (4096, 1, 4), "BF16"),
        ("model.layers.0.self_attn.o_norm.weight", (128,), "BF16"),
        ("model.layers.3.self_attn.q_proj.weight", (32 * 192, 2304), "BF16"),
        ("model.layers.26.self_attn.kv_a_proj_with_mqa.weight", (576, 2304), "BF16"),
        ("model.layers.0.mlp.down_proj.weight", (2304, 9216), "BF16"),
        ("model.layers.1.block_sparse_moe.gate.weight", (256, 2304), "BF16"),
        ("model.layers.1.block_sparse_moe.experts.255.w2.weight", (2304, 1024), "BF16"),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (1024, 2304), "BF16"),
    ],
)
def test_tensors_of_kimi_linear(kimi_linear, key, shape, dtype):
    entry = {entry.key: entry for entry in kimi_linear.entries}[key]
    assert (entry.shape, entry.dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "absent",
    [
        "res_norm",  # a plain residual
        "self_attn.q_a_proj",  # the query has no latent
        "self_attn.g_proj",  # KDA's gate is low rank, MLA has none
        "routed_expert",  # experts read the hidden row
        "weight_packed",
        "language_model.",
    ],
)
def test_absent_from_kimi_linear(kimi_linear, absent):
    assert not any(absent in entry.key for entry in kimi_linear.entries)


def test_switches_of_kimi_linear():
    config = ModelConfig.from_dict(published_config("kimi_linear_48b"))
    k3 = ModelConfig.from_dict(published_config("kimi_k3_mxfp4"))
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (
        27,
        2304,
        32,
    )
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    for name, ours, theirs in [
        ("attn_res_block_size", None, 12),
        ("kda_gate_lower_bound", None, -5.0),
        ("kda_full_rank_gate", False, True),
        ("q_lora_rank", None, 1536),
        ("mla_output_gate", False, True),
        ("routed_expert_hidden_size", None, 3584),
        ("latent_moe_use_norm", False, True),
        ("num_experts", 256, 896),
        ("num_experts_per_token", 8, 16),
        ("num_shared_experts", 1, 2),
        ("routed_scaling_factor", 2.446, 1.0),
        ("hidden_act", "silu", "situ"),
        ("quant_method", None, "compressed-tensors"),
        ("kda_num_heads", 32, 96),
    ]:
        assert (getattr(config, name), getattr(k3, name)) == (ours, theirs), name
    for name in (  # what both share
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim kda_head_dim conv_kernel_size "
        "latent_norm_eps rms_norm_eps moe_renormalize first_k_dense_replace"
    ).split():
        assert getattr(config, name) == getattr(k3, name), name
    assert config.latent_norm_eps == 1e-6


def test_published_kimi_linear(kimi_linear):
    manifest = kimi_linear
    assert manifest.num_tensors == 20 * 15 + 7 * 5 + 26 * (2 + 3 + 3 * 256) + 27 * 2 + 3 + 3
    assert {entry.part for entry in manifest.entries} == {"text model"}
    assert not any(entry.key.startswith("language_model.") for entry in manifest.entries)


@pytest.mark.parametrize("name", NAMES)
def test_published_configs_are_accepted(name):
    assert ModelConfig.from_dict(published_config(name)).max_position_embeddings == 1048576


def test_unknown_algorithm_of_a_layer():
    config = published_config("kimi_k3_nvfp4")
    layers = config["quantization_config"]["quantized_layers"]
    name = "language_model.model.layers.0.self_attn.q_proj"
    layers[name] = {"quant_algo": "MXFP8"}
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\.quant_algo='MXFP8'"):
        manifest_from_config(config)


def test_unknown_quantization():
    config = published_config("kimi_k3_mxfp4")
    config["text_config"]["quantization_config"]["format"] = "int3"
    with pytest.raises(ConfigError, match=r"quantization_config.format='int3'"):
        manifest_from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_checkpoint_has_a_field(originals, family):
    path = originals[family].path
    manifest, problems = account(Checkpoint.open(path), ModelConfig.load(path))
    assert not problems
    stored = originals[family].tensors()
    assert {entry.key for entry in manifest.entries} == stored.keys()
    assert all(entry.field for entry in manifest.entries)
    assert manifest.num_bytes == sum(value.nbytes for value in stored.values())
    kv_b = next(entry for entry in manifest.entries if "kv_b_proj" in entry.key)
    assert kv_b.field == "layers.2.attention.w_k, layers.2.attention.w_v"


def test_vision_tensors_are_named_as_not_loaded(kimi_k3):
    kimi_k3.add("vision_tower.patch_embed.proj.weight", torch.zeros(4))
    kimi_k3.add("mm_projector.proj.0.weight", torch.zeros(4))
    manifest, problems = account(Checkpoint.open(kimi_k3.path), ModelConfig.load(kimi_k3.path))
    assert not problems
    assert {entry.part: entry.key for entry in manifest.entries if entry.field is None} == {
        "vision tower": "vision_tower.patch_embed.proj.weight",
        "vision projector": "mm_projector.proj.0.weight",
    }
