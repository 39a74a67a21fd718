"""What a checkpoint's config.json says about the forward, for K3 and Kimi-Linear alike.

The two families are told apart by their keys, never by a class name: both call themselves
KimiLinearForCausalLM. tercel.core.config_keys refuses what could change the forward unnoticed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercel.core.config_keys import check_keys, check_outer_keys, with_aliases
from tercel.errors import ConfigError

LATENT_NORM_EPS = 1e-6
"""The published model builds the two MLA latent norms with its class default, not rms_norm_eps."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one checkpoint's text model; layer indices are 0-based."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float
    latent_norm_eps: float
    max_position_embeddings: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    mla_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    kda_full_rank_gate: bool
    kda_gate_lower_bound: float | None
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    routed_scaling_factor: float
    moe_renormalize: bool
    hidden_act: str
    situ_beta: float | None
    situ_linear_beta: float | None
    attn_res_block_size: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    quant_method: str | None
    """What the config declares; whether a tensor is quantized is read from the tensors."""
    quant_format: str | None
    """Of compressed-tensors."""

    @property
    def latent_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def kda_size(self) -> int:
        """Channels of q, k, v or the output gate over all heads."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def mla_latent_dim(self) -> int:
        """Cached values per token and MLA layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_snapshots(self) -> int:
        """Rows of the attention-residual bank at the end of the model."""
        if self.attn_res_block_size is None:
            return 0
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def takes_snapshot(self, layer: int) -> bool:
        """Whether the prefix sum becomes a bank row before this layer's attention."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    @classmethod
    def load(cls, model_dir: Path) -> "ModelConfig":
        """Reads `model_dir`/config.json; raises ConfigError naming the file and the key."""
        return cls.from_dict(read_config_json(model_dir))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """From a parsed config.json, with or without the text_config level."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config: expected an object, got {type(text).__name__}")
        if text is not config:
            check_outer_keys(config)
        text = with_aliases(text)
        check_keys(text)
        linear = text["linear_attn_config"]
        mla_layers = _mla_layers(linear, text["num_hidden_layers"])
        hidden_act = text.get("hidden_act", "silu")
        if hidden_act not in ("situ", "silu"):
            raise ConfigError(f"hidden_act: {hidden_act!r} is not supported; use situ or silu")
        quantization = text.get("quantization_config") or config.get("quantization_config") or {}

        def token(name: str) -> int | None:
            value = config.get(name, text.get(name))
            return value if isinstance(value, int) else None

        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_hidden_layers=text["num_hidden_layers"],
            intermediate_size=text["intermediate_size"],
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-5)),
            latent_norm_eps=LATENT_NORM_EPS,
            max_position_embeddings=text.get("max_position_embeddings", 4096),
            num_attention_heads=text["num_attention_heads"],
            q_lora_rank=text.get("q_lora_rank"),
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            mla_output_gate=text.get("mla_use_output_gate", False),
            mla_layers=mla_layers,
            kda_num_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            conv_kernel_size=linear["short_conv_kernel_size"],
            kda_full_rank_gate=linear.get("use_full_rank_gate", False),
            kda_gate_lower_bound=_float(linear.get("gate_lower_bound")),
            first_k_dense_replace=text.get("first_k_dense_replace", 0),
            num_experts=text["num_experts"],
            num_experts_per_token=text["num_experts_per_token"],
            num_shared_experts=text["num_shared_experts"],
            moe_intermediate_size=text["moe_intermediate_size"],
            routed_expert_hidden_size=text.get("routed_expert_hidden_size"),
            latent_moe_use_norm=text.get("latent_moe_use_norm", False),
            routed_scaling_factor=float(text.get("routed_scaling_factor", 1.0)),
            moe_renormalize=text.get("moe_renormalize", True),
            hidden_act=hidden_act,
            situ_beta=_float(text.get("activation_situ_beta")),
            situ_linear_beta=_float(text.get("activation_situ_linear_beta")),
            attn_res_block_size=text.get("attn_res_block_size"),
            bos_token_id=token("bos_token_id"),
            eos_token_id=token("eos_token_id"),
            pad_token_id=token("pad_token_id"),
            quant_method=quantization.get("quant_method"),
            quant_format=quantization.get("format"),
        )


def read_config_json(model_dir: Path, option: str = "model") -> dict[str, Any]:
    """The parsed config.json of a directory that `option` names; ConfigError says which part is
    missing."""
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise ConfigError(f"{option}: {model_dir} is not a directory; pass a checkpoint directory")
    if not path.is_file():
        raise ConfigError(f"{option}: {path} is missing; {model_dir} is not a checkpoint directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{option}: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{option}: {path} must hold an object, got {type(config).__name__}")
    return config


def _float(value: float | None) -> float | None:
    """JSON writes a whole number without a point."""
    return None if value is None else float(value)


def _mla_layers(linear: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """0-based MLA layers from the published 1-based lists, which must cover every layer once."""
    full = sorted(layer - 1 for layer in linear["full_attn_layers"])
    kda = sorted(layer - 1 for layer in linear.get("kda_layers", []))
    covers = len(full) + len(kda) == num_layers and sorted(full + kda) == list(range(num_layers))
    if "kda_layers" in linear and not covers:
        raise ConfigError(
            "linear_attn_config: full_attn_layers and kda_layers (1-based) must list each of "
            f"the {num_layers} layers exactly once"
        )
    if full and not 0 <= full[0] <= full[-1] < num_layers:
        raise ConfigError(f"linear_attn_config.full_attn_layers: outside 1..{num_layers}")
    return tuple(full)
