"""Drafters for tests: published configurations, oracle vectors, the reference of a config."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tercel.core.drafter import DrafterConfig
from tercel.core.drafter_formats import drafter_config

VECTORS = Path(__file__).parent / "vectors"

SPECFORGE: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_hidden_layers": 5,
    "intermediate_size": 14336,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "block_size": 7,
    "num_target_layers": 93,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "dflash_config": {
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "target_layer_ids": [7, 23, 51, 67, 83],
        "mask_token_id": 163824,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "Kimi-K3"}},
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "block_size": 8,
    "mask_token_id": 163837,
    "draft_vocab_size": 163840,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_hidden_layers": 5,
        "intermediate_size": 14336,
        "num_attention_heads": 96,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "layer_types": ["sliding_attention"] * 5,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
K3_DSPARK: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "draft_vocab_size": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def read_vector(name: str) -> tuple[DrafterConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """(config, checkpoint tensors, inputs and what transformers computes from them)."""
    path = VECTORS / name
    config = drafter_config(json.loads((path / "config.json").read_text()))
    return config, load_file(path / "model.safetensors"), load_file(path / "expected.safetensors")


SPELLED = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
"""K3DSparkModel's names of what the reference names otherwise."""


def reference_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under the reference's names."""
    renamed = {}
    for name, value in tensors.items():
        first, dot, rest = name.removeprefix("model.").partition(".")
        renamed[SPELLED.get(first, first) + dot + rest] = value
    return renamed
