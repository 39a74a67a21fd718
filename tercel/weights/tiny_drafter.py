"""Small random drafters for a given target, in every published format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tercel.core.drafter_formats import drafter_config
from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.drafter_table import Names, drafter_table
from tercel.weights.header import TORCH_DTYPES
from tercel.weights.manifest import expected
from tercel.weights.random import random_tensor
from tercel.weights.shards import write_json

FORMATS = ("specforge", "speculators", "k3_dspark")

_HEADS: Mapping[str, Any] = {
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_GQA: Mapping[str, Any] = {"num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu"}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_interleave": True,
}


def tiny_drafter_config(
    format: str, target: ModelConfig, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A config.json of `format` for `target`: two layers, seven guesses, three taps, and the last
    id but one as mask token. `changes` replace keys where the format has them."""
    layers, mask = target.num_hidden_layers, target.vocab_size - 2
    taps = sorted({layers // 4, layers // 2, layers - 2})
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    backbone = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 2,
        "intermediate_size": 2 * target.hidden_size,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": rope,
    }
    if format == "specforge":
        config: dict[str, Any] = {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            **backbone,
            **_GQA,
            "block_size": 7,
            "num_target_layers": layers,
            "dflash_config": {
                "projector_type": "dspark",
                "target_layer_ids": taps,
                "mask_token_id": mask,
                **_HEADS,
            },
        }
    elif format == "speculators":
        config = {
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
            "block_size": 7,
            "mask_token_id": mask,
            "sample_from_anchor": True,
            "transformer_layer_config": {"model_type": "qwen3", **backbone, **_GQA},
            **_HEADS,
        }
    elif format == "k3_dspark":
        config = {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            **backbone,
            **_MLA,
            "block_size": 7,
            "num_target_layers": len(taps),
            "target_num_hidden_layers": layers,
            "target_layer_ids": taps,
            "mask_token_id": mask,
            **_HEADS,
        }
    else:
        raise ConfigError(f"format: {format!r} is unknown; there is {', '.join(FORMATS)}")
    _replace(config, dict(changes or {}))
    return config


def _replace(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Sets each key on the level that has it, else on the outermost."""
    levels = [config, *(value for value in config.values() if isinstance(value, dict))]
    for name, value in changes.items():
        level = next((level for level in levels if name in level), config)
        level[name] = value


def write_random_drafter(
    out: Path,
    config_json: Mapping[str, Any],
    *,
    seed: int = 0,
    embed: torch.Tensor | None = None,
) -> None:
    """config.json and model.safetensors with random tensors of every name that it implies, and
    `embed` as the drafter's embed_tokens where given."""
    table = drafter_table(drafter_config(config_json), Names())
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        key: random_tensor(key, source.shape, TORCH_DTYPES[source.dtype], generator)
        for key, (source, _) in expected(table).items()
    }
    if embed is not None:
        tensors["embed_tokens.weight"] = embed.bfloat16().contiguous()
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", dict(config_json))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
