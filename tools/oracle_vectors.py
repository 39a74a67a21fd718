"""Writes a tiny random checkpoint and the logits that another library computes from it.

Two vectors, each a directory with a checkpoint in the published layout (`config.json`,
`model.safetensors`) and `expected.safetensors` (`tokens` int64, `logits` fp32, and as metadata the
library, its version, the seed and the SHA-256 of this file):

    kimi_k3      by mlx-lm: every K3 feature, MXFP4 experts, attention residuals in blocks of 3,
                 interleaved MLA layers and a final pair
    kimi_linear  by transformers: the Kimi-Linear keys, 70 tokens, so two chunks of its KDA

The library loads the checkpoint with its own loader and computes in fp32; nothing of tercel runs
here. To re-create them, in one fresh environment per library (the fla package must be absent):

    pip install mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
    python tools/oracle_vectors.py --oracle mlx_lm --out tests/vectors
    pip install torch==2.13.0 transformers==5.23.0
    python tools/oracle_vectors.py --oracle transformers --out tests/vectors
"""

import argparse
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

SHARED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 127,
    "bos_token_id": 125,
    "eos_token_id": 126,
}
KDA = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}

KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": SHARED
    | {
        "num_hidden_layers": 9,
        "attn_res_block_size": 3,
        "q_lora_rank": 24,
        "mla_use_output_gate": True,
        "linear_attn_config": KDA
        | {
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8, 9],
        },
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "num_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
        },
    },
}
KIMI_LINEAR: dict[str, Any] = SHARED | {
    "num_hidden_layers": 6,
    "q_lora_rank": None,
    "linear_attn_config": KDA | {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6]},
    "hidden_act": "silu",
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
}

FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def kda_shapes(c: dict[str, Any]) -> Shapes:
    hidden, linear = c["hidden_size"], c["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width, full_rank = heads * dim, linear.get("use_full_rank_gate", False)
    shapes: Shapes = {f"{name}_proj.weight": (width, hidden) for name in "qkv"}
    shapes |= {f"{name}_conv1d.weight": (width, 1, 4) for name in "qkv"}
    shapes |= {"f_a_proj.weight": (dim, hidden), "f_b_proj.weight": (width, dim)}
    if full_rank:
        shapes["g_proj.weight"] = (width, hidden)
    else:
        shapes |= {"g_a_proj.weight": (dim, hidden), "g_b_proj.weight": (width, dim)}
    # K3 pads A_log to head_dim, so that it looks like one value per channel.
    shapes |= {"A_log": (dim,) if full_rank else (1, 1, heads, 1), "dt_bias": (width,)}
    shapes |= {"b_proj.weight": (heads, hidden), "o_norm.weight": (dim,)}
    return shapes | {"o_proj.weight": (hidden, width)}


def mla_shapes(c: dict[str, Any]) -> Shapes:
    hidden, heads, rank, latent = (
        c[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes: Shapes = {}
    if rank is None:
        shapes["q_proj.weight"] = (heads * (nope + rope), hidden)
    else:
        shapes |= {"q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,)}
        shapes["q_b_proj.weight"] = (heads * (nope + rope), rank)
    shapes["kv_a_proj_with_mqa.weight"] = (latent + rope, hidden)
    shapes["kv_a_layernorm.weight"] = (latent,)
    shapes["kv_b_proj.weight"] = (heads * (nope + value_dim), latent)
    if c.get("mla_use_output_gate"):
        shapes["g_proj.weight"] = (heads * value_dim, hidden)
    return shapes | {"o_proj.weight": (hidden, heads * value_dim)}


def mlp_shapes(hidden: int, width: int) -> Shapes:
    up, down = (width, hidden), (hidden, width)
    return {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}


def expert_shapes(c: dict[str, Any]) -> Shapes:
    latent = c.get("routed_expert_hidden_size") or c["hidden_size"]
    up, down = (c["moe_intermediate_size"], latent), (latent, c["moe_intermediate_size"])
    shapes: Shapes = {}
    for expert in range(c["num_experts"]):
        for name, (out, size) in {"w1": up, "w3": up, "w2": down}.items():
            if "quantization_config" in c:
                shapes[f"experts.{expert}.{name}.weight_packed"] = (out, size // 2)
                shapes[f"experts.{expert}.{name}.weight_scale"] = (out, size // 32)
            else:
                shapes[f"experts.{expert}.{name}.weight"] = (out, size)
    return shapes


def moe_shapes(c: dict[str, Any]) -> Shapes:
    hidden, latent = c["hidden_size"], c.get("routed_expert_hidden_size")
    shapes: Shapes = {
        "gate.weight": (c["num_experts"], hidden),
        "gate.e_score_correction_bias": (c["num_experts"],),
    }
    if latent:
        shapes["routed_expert_down_proj.weight"] = (latent, hidden)
        shapes["routed_expert_norm.weight"] = (latent,)
        shapes["routed_expert_up_proj.weight"] = (hidden, latent)
    shared = mlp_shapes(hidden, c["num_shared_experts"] * c["moe_intermediate_size"])
    return shapes | {f"shared_experts.{n}": s for n, s in shared.items()} | expert_shapes(c)


def checkpoint_shapes(config: dict[str, Any]) -> Shapes:
    """Published tensor names and shapes, in the order of the layers."""
    c, prefix = config.get("text_config", config), "language_model." * ("text_config" in config)
    vector, site = (c["hidden_size"],), (1, c["hidden_size"])
    residuals = "attn_res_block_size" in c
    table = (c["vocab_size"], c["hidden_size"])
    shapes: Shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    shapes["model.norm.weight"] = vector
    if residuals:
        shapes |= {"model.output_attn_res_norm.weight": vector}
        shapes |= {"model.output_attn_res_proj.weight": site}
    for layer in range(c["num_hidden_layers"]):
        is_kda = layer + 1 in c["linear_attn_config"]["kda_layers"]
        attention = kda_shapes(c) if is_kda else mla_shapes(c)
        parts = {f"self_attn.{n}": s for n, s in attention.items()}
        if layer < c["first_k_dense_replace"]:
            dense = mlp_shapes(c["hidden_size"], c["intermediate_size"])
            parts |= {f"mlp.{n}": s for n, s in dense.items()}
        else:
            parts |= {f"block_sparse_moe.{n}": s for n, s in moe_shapes(c).items()}
        parts |= {"input_layernorm.weight": vector, "post_attention_layernorm.weight": vector}
        for name in ("self_attention_res", "mlp_res") if residuals else ():
            parts |= {f"{name}_norm.weight": vector, f"{name}_proj.weight": site}
        shapes |= {f"model.layers.{layer}.{n}": s for n, s in parts.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def random_array(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a size that makes every part of the model visible in the logits."""
    if name.endswith("weight_packed"):
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if name.endswith("weight_scale"):
        return rng.integers(122, 125, shape, dtype=np.uint8)
    normal = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        # Along the first axis K3 has its heads and their padding, Kimi-Linear a single entry.
        return (0.5 + 0.5 * normal) * (np.indices(shape)[0] < KDA["num_heads"]).astype(np.float32)
    if name.endswith("dt_bias"):
        return normal - 1
    if name.endswith("e_score_correction_bias"):
        return 0.2 * normal
    if "norm." in name:
        return 1 + 0.3 * normal
    if name.endswith(("conv1d.weight", "embed_tokens.weight")):
        return 0.5 * normal
    value: np.ndarray = normal / np.sqrt(np.float32(shape[-1]))
    if name.endswith(("res_proj.weight", "up_proj.weight")):
        return 2 * value
    # Latents of rms 0.003, where the eps of their norm matters; not so the shared key dims.
    if name.endswith("q_a_proj.weight"):
        return 0.003 * value
    if name.endswith("kv_a_proj_with_mqa.weight"):
        value[: SHARED["kv_lora_rank"]] *= 0.003
    return value


def mlx_lm_oracle() -> tuple[str, Callable[..., None], Callable[[Path, np.ndarray], np.ndarray]]:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)

    def save(path: Path, arrays: Arrays, bf16: set[str], metadata: dict[str, str]) -> None:
        tensors = {name: mx.array(array) for name, array in arrays.items()}
        tensors |= {name: tensors[name].astype(mx.bfloat16) for name in bf16}
        mx.save_safetensors(str(path), tensors, metadata)

    def logits(path: Path, tokens: np.ndarray) -> np.ndarray:
        model, _ = load_model(path)
        model.set_dtype(mx.float32)
        return np.asarray(model(mx.array(tokens)))

    return importlib.metadata.version("mlx-lm"), save, logits


def transformers_oracle() -> tuple[
    str, Callable[..., None], Callable[[Path, np.ndarray], np.ndarray]
]:
    import torch
    import transformers
    from safetensors.torch import save_file

    def save(path: Path, arrays: Arrays, bf16: set[str], metadata: dict[str, str]) -> None:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= {name: tensors[name].bfloat16() for name in bf16}
        save_file(tensors, path, {"format": "pt"} | metadata)

    def logits(path: Path, tokens: np.ndarray) -> np.ndarray:
        model = transformers.KimiLinearForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(tokens), use_cache=False).logits)

    return transformers.__version__, save, logits


ORACLES = {
    "mlx_lm": ("kimi_k3", KIMI_K3, mlx_lm_oracle, 40),
    "transformers": ("kimi_linear", KIMI_LINEAR, transformers_oracle, 70),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", choices=ORACLES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    name, config, oracle, length = ORACLES[args.oracle]
    version, save, logits = oracle()
    rng = np.random.default_rng(args.seed)
    shapes = checkpoint_shapes(config)
    arrays = {key: np.asarray(random_array(rng, key, shape)) for key, shape in shapes.items()}
    bf16 = {k for k, a in arrays.items() if a.dtype == np.float32 and not k.endswith(FP32)}
    tokens = rng.integers(0, 125, (2, length))

    path = args.out / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save(path / "model.safetensors", arrays, bf16, {})
    expected = {"tokens": tokens, "logits": logits(path, tokens).astype(np.float32)}
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    metadata = {"library": args.oracle, "version": version, "seed": str(args.seed)}
    save(path / "expected.safetensors", expected, set(), metadata | {"script_sha256": script})


if __name__ == "__main__":
    main()
