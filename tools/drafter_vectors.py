"""Writes two tiny random drafters and what layers of transformers compute from them.

Each vector is a directory with a drafter in a published layout (`config.json`,
`model.safetensors`) and `expected.safetensors`: `taps` [S, taps * target hidden], `anchor` and
`position`, the target's `embed` and `head`, and from them `hidden` [g, hidden], `tokens` [g],
`logits` [g, V] and `confidence` [g] of a greedy draft.

    drafter_gqa  SpecForge: Qwen3 attention, YaRN, one sliding layer causal in its block
    drafter_mla  K3DSparkModel: DeepSeek-V3 attention, YaRN in the softmax scale, a norm per tap

The context rows are put in front of the block's rows, so that the library's self-attention makes
keys and values of them; the mask hides what a drafter's slots do not see. To re-create them:

    pip install torch==2.13.0 transformers==5.23.0
    python tools/drafter_vectors.py --out tests/vectors
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3 import modeling_qwen3 as qwen

SEED, CONTEXT, TARGET_HIDDEN, DRAFTS = 7, 21, 24, 5
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
YARN |= {"rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
SHARED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
SHARED |= {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}

GQA: dict[str, Any] = SHARED | {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "block_size": 6,
    "num_target_layers": 9,
    "target_hidden_size": TARGET_HIDDEN,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
    "rope_parameters": YARN,
    "dflash_config": {
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "target_layer_ids": [1, 4, 7],
        "mask_token_id": 61,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "causal": True,
        "shift_label": True,
    },
}
MLA: dict[str, Any] = SHARED | {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_theta": 10000.0,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "num_target_layers": 3,
    "target_num_hidden_layers": 9,
    "target_hidden_size": TARGET_HIDDEN,
    "target_layer_ids": [2, 5, 8],
    "fc_norm": True,
    "aux_hidden_stream": "attn_res",
    "mask_token_id": 62,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "draft_vocab_size": 64,
}

Tensors = dict[str, torch.Tensor]


def layer(config: dict[str, Any], index: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One decoder layer of the library and its rotary embedding."""
    if config["model_type"] == "qwen3":
        keys = {k: v for k, v in config.items() if k != "architectures"}
        library, module = Qwen3Config(**keys), qwen
        block = qwen.Qwen3DecoderLayer(library, index)
        rotary = qwen.Qwen3RotaryEmbedding(library)
    else:
        keys = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
        library, module = DeepseekV3Config(**keys, rope_interleave=True), deepseek
        library.first_k_dense_replace = index + 1
        block = deepseek.DeepseekV3DecoderLayer(library, index)
        rotary = deepseek.DeepseekV3RotaryEmbedding(library)
        for norm in (block.self_attn.q_a_layernorm, block.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config["rms_norm_eps"]
    library._attn_implementation = "eager"
    assert module is not None
    return block, rotary


def random(generator: torch.Generator, name: str, *shape: int) -> torch.Tensor:
    """Values that bf16 holds."""
    value = torch.randn(shape, generator=generator)
    value = 1 + 0.2 * value if "norm" in name else value * 2 * shape[-1] ** -0.5
    return value.bfloat16().float()


def weights(config: dict[str, Any], generator: torch.Generator) -> Tensors:
    """Every tensor of the checkpoint under its published name."""
    mla = config["model_type"] == "k3_dspark"
    hidden, vocabulary, taps = config["hidden_size"], config["vocab_size"], 3
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight" if mla else "fc.weight": (hidden, taps * TARGET_HIDDEN),
        "context_norm.weight" if mla else "hidden_norm.weight": (hidden,),
        "final_norm.weight" if mla else "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocabulary, 4),
        "markov_head.markov_w2.weight": (vocabulary, 4),
        "confidence_head.proj.weight": (1, hidden + 4),
        "confidence_head.proj.bias": (1,),
    }
    if mla:
        shapes |= {f"fc_norm.{tap}.weight": (TARGET_HIDDEN,) for tap in range(taps)}
        shapes["embed_tokens.weight"] = (vocabulary, hidden)
    for index in range(config["num_hidden_layers"]):
        block, _ = layer(config, index)
        for name, value in block.state_dict().items():
            shapes[f"layers.{index}.{name}"] = tuple(value.shape)
    return {name: random(generator, name, *shape) for name, shape in shapes.items()}


def mask(config: dict[str, Any], index: int, position: int) -> torch.Tensor:
    """[1, 1, S + g, S + g]; the rows of the context are not used."""
    size = CONTEXT + DRAFTS
    where = torch.cat([torch.arange(CONTEXT), position + torch.arange(DRAFTS)])
    seen = torch.zeros(size, size, dtype=torch.bool)
    seen[CONTEXT:, :CONTEXT] = where[:CONTEXT] < position
    seen[CONTEXT:, CONTEXT:] = True
    if config["model_type"] == "qwen3":
        if config["layer_types"][index] == "sliding_attention":
            seen &= (where[:, None] - where).abs() < config["sliding_window"]
        seen[CONTEXT:, CONTEXT:].tril_()
    seen[:CONTEXT, 0] = True
    return torch.zeros(size, size).masked_fill(~seen, float("-inf"))[None, None]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def forward(config: dict[str, Any], w: Tensors, given: Tensors) -> Tensors:
    mla, position = config["model_type"] == "k3_dspark", int(given["position"])
    taps = given["taps"]
    if mla:
        parts = taps.chunk(3, -1)
        taps = torch.cat([rms_norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1)
    fc, norm = ("context_proj", "context_norm") if mla else ("fc", "hidden_norm")
    context = rms_norm(taps @ w[f"{fc}.weight"].T, w[f"{norm}.weight"])
    table = w["embed_tokens.weight"] if mla else given["embed"]
    mask_id = config["mask_token_id"] if mla else config["dflash_config"]["mask_token_id"]
    h = table[torch.tensor([int(given["anchor"])] + [mask_id] * (DRAFTS - 1))]
    where = torch.cat([torch.arange(CONTEXT), position + torch.arange(DRAFTS)])[None]
    for index in range(config["num_hidden_layers"]):
        block, rotary = layer(config, index)
        prefix = f"layers.{index}."
        block.load_state_dict({n: w[prefix + n] for n in block.state_dict()})
        rows = torch.cat([context, block.input_layernorm(h)])[None]
        attended, _ = block.self_attn(
            hidden_states=rows,
            position_embeddings=rotary(rows, where),
            attention_mask=mask(config, index, position),
        )
        h = h + attended[0, CONTEXT:]
        h = h + block.mlp(block.post_attention_layernorm(h))
    hidden = rms_norm(h, w["final_norm.weight" if mla else "norm.weight"])
    return {"hidden": hidden, **heads(w, hidden, given)}


def heads(w: Tensors, hidden: torch.Tensor, given: Tensors) -> Tensors:
    """The greedy chain over the Markov head, and the confidence of each slot."""
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    previous, tokens, logits, confidence = int(given["anchor"]), [], [], []
    for row in hidden:
        logits.append(given["head"] @ row + w2 @ w1[previous])
        features = torch.cat([row, w1[previous]])
        confidence.append(w["confidence_head.proj.weight"][0] @ features)
        previous = int(logits[-1].argmax())
        tokens.append(previous)
    return {
        "tokens": torch.tensor(tokens),
        "logits": torch.stack(logits),
        "confidence": torch.stack(confidence) + w["confidence_head.proj.bias"],
    }


def write(out: Path, config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(SEED)
    w = weights(config, generator)
    given = {
        "taps": random(generator, "taps", CONTEXT, 3 * TARGET_HIDDEN) * 4,
        "embed": random(generator, "embed", config["vocab_size"], config["hidden_size"]),
        "head": random(generator, "head", config["vocab_size"], config["hidden_size"]),
        "anchor": torch.tensor(17),
        "position": torch.tensor(CONTEXT - 3),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: value.bfloat16() for name, value in w.items()}, out / "model.safetensors")
    with torch.no_grad():
        expected = forward(config, w, given)
    tensors = {name: value.contiguous() for name, value in (given | expected).items()}
    save_file(tensors, out / "expected.safetensors", metadata={"seed": str(SEED)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    root = parser.parse_args().out
    write(root / "drafter_gqa", GQA)
    write(root / "drafter_mla", MLA)
