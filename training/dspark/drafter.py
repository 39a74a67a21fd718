"""The drafter that is trained: its config.json, its initial weights and its checkpoint."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tercel.core.drafter import DrafterConfig, Embedding, GqaShape
from tercel.reference.drafter import Config, Drafter, MarkovHead, Yarn
from tercel.reference.kimi_k3 import Config as TargetConfig
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.fingerprint import fingerprint


def config_json(
    target: TargetConfig,
    target_dir: Path,
    *,
    taps: list[int],
    mask_token_id: int,
    max_position_embeddings: int,
    layers: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate_size: int = 768,
    block_size: int = 7,
    markov_rank: int = 64,
) -> dict[str, Any]:
    """A SpecForge config for `target`: GQA, the mixture tapped, every slot predicts, both heads."""
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": target.num_hidden_layers,
        "target_fingerprint": fingerprint(Checkpoint.open(target_dir)),
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "target_layer_ids": taps,
            "aux_hidden_stream": "attn_res",
            "mask_token_id": mask_token_id,
            "markov_rank": markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    }


def reference_config(c: DrafterConfig, embedding: Embedding = Embedding.TARGET) -> Config:
    """What the reference is built from, of a drafter whose blocks take `embedding`."""
    shape = c.attention
    if isinstance(shape, GqaShape):
        attention: dict[str, Any] = {
            "attention": "gqa",
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        }
    else:
        attention = {"attention": "mla", "num_attention_heads": shape.num_heads}
        attention |= {k: v for k, v in vars(shape).items() if k != "num_heads"}
    yarn = None if c.rope.yarn is None else Yarn(**vars(c.rope.yarn))
    names = """hidden_size vocab_size num_hidden_layers intermediate_size rms_norm_eps windows
        window_from_anchor causal target_hidden_size fc_norm block_size anchor_predicts
        mask_token_id markov_rank confidence_head confidence_with_markov""".split()
    return Config(
        **{name: getattr(c, name) for name in names},
        **attention,
        rope_theta=c.rope.theta,
        rope_interleaved=c.rope.interleaved,
        yarn=yarn,
        tap_ids=c.taps,
        tap_stream=c.tap_stream.value,
        embedding=embedding.value,
    )


def init_weights(drafter: Drafter, embed: Tensor, seed: int) -> None:
    """Normal matrices that keep the size of a row, a Markov head that says nothing yet, and the
    target's row for the mask token."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * drafter.config.num_hidden_layers) ** -0.5
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            scale = depth if name.endswith(("o_proj", "down_proj")) else 1.0
            std = scale * module.in_features**-0.5
            module.weight.data.normal_(0.0, std, generator=generator)
        if isinstance(module, MarkovHead):
            module.markov_w1.weight.data.normal_(0.0, 0.1, generator=generator)
    if hasattr(drafter, "markov_head"):
        drafter.markov_head.markov_w2.weight.data.zero_()
    if hasattr(drafter, "confidence_head"):
        drafter.confidence_head.proj.weight.data.zero_()
        drafter.confidence_head.proj.bias.data.zero_()
    if drafter.config.embedding == "mask_row":
        drafter.mask_row.data.copy_(embed[drafter.config.mask_token_id])


def export(drafter: Drafter, config: dict[str, Any], embed: Tensor, directory: Path) -> None:
    """config.json and model.safetensors; a trained mask row stands in a copy of the target's
    embedding, as the published formats have no tensor of its own for it."""
    tensors = {name: x.detach().bfloat16().cpu() for name, x in drafter.state_dict().items()}
    row = tensors.pop("mask_row", None)
    if row is not None:
        table = embed.detach().bfloat16().cpu().clone()
        table[drafter.config.mask_token_id] = row
        tensors["embed_tokens.weight"] = table
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial = directory / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")
