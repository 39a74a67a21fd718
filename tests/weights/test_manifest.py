import copy

import pytest
import torch

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.manifest import account, manifest_from_config
from tercel.weights.published import NAMES, published_config
from tercel.weights.tiny import FAMILIES

EXPERT_BYTES = 3 * 3072 * 3584 // 2 * 17 // 16
"""Three matrices of four bits per value and a scale byte per 32."""


def test_published_k3_exactly():
    manifest = manifest_from_config(published_config("kimi_k3_mxfp4"))
    assert (manifest.num_tensors, manifest.num_bytes) == (497_220, 1_560_860_324_864)
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


def test_published_kimi_linear():
    manifest = manifest_from_config(published_config("kimi_linear_48b"))
    assert manifest.num_tensors == 20 * 15 + 7 * 5 + 26 * (2 + 3 + 3 * 256) + 27 * 2 + 3 + 3
    assert {entry.part for entry in manifest.entries} == {"text model"}
    assert not any(entry.key.startswith("language_model.") for entry in manifest.entries)


@pytest.mark.parametrize("name", NAMES)
def test_published_configs_are_accepted(name):
    assert ModelConfig.from_dict(published_config(name)).max_position_embeddings == 1048576


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
