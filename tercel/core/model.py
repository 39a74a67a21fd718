"""What a checkpoint's config.json says about the forward, for K3 and Kimi-Linear alike.

The two families are told apart by their keys, never by a class name: both call themselves
KimiLinearForCausalLM. A key that is not listed here and could change the forward is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercel.errors import ConfigError

LATENT_NORM_EPS = 1e-6
"""The published model builds the two MLA latent norms with its class default, not rms_norm_eps."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_shared_experts",
    "moe_intermediate_size",
    "linear_attn_config",
)
_READ = (
    *_REQUIRED,
    "rms_norm_eps",
    "q_lora_rank",
    "mla_use_output_gate",
    "num_experts_per_token",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "moe_renormalize",
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "max_position_embeddings",
    "quantization_config",
    "num_key_value_heads",
)
TRANSFORMERS_KEYS = frozenset(
    """architectures model_type dtype torch_dtype transformers_version auto_map
    initializer_range use_cache bos_token_id eos_token_id pad_token_id attention_dropout
    output_hidden_states return_dict name_or_path _name_or_path id2label label2id
    is_encoder_decoder chunk_size_feed_forward problem_type
    add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_scores prefix pruned_heads remove_invalid_values repetition_penalty
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p
    use_bfloat16""".split()
)
"""Names, defaults of text generation, and what else transformers writes into any config."""
_INERT = TRANSFORMERS_KEYS | frozenset(
    """head_dim rope_theta use_grouped_topk vision_config media_placeholder_token_id
    image_placeholder ignore_index text_config""".split()
)
"""What the published files carry without using it."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "num_nextn_predict_layers": (0,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "rope_scaling": (None,),
}
_LINEAR_READ = frozenset(
    """num_heads head_dim short_conv_kernel_size use_full_rank_gate gate_lower_bound
    full_attn_layers kda_layers""".split()
)


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
        text = _with_aliases(text)
        _check_keys(text)
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
            rms_norm_eps=text.get("rms_norm_eps", 1e-5),
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
            kda_gate_lower_bound=linear.get("gate_lower_bound"),
            first_k_dense_replace=text.get("first_k_dense_replace", 0),
            num_experts=text["num_experts"],
            num_experts_per_token=text["num_experts_per_token"],
            num_shared_experts=text["num_shared_experts"],
            moe_intermediate_size=text["moe_intermediate_size"],
            routed_expert_hidden_size=text.get("routed_expert_hidden_size"),
            latent_moe_use_norm=text.get("latent_moe_use_norm", False),
            routed_scaling_factor=text.get("routed_scaling_factor", 1.0),
            moe_renormalize=text.get("moe_renormalize", True),
            hidden_act=hidden_act,
            situ_beta=text.get("activation_situ_beta"),
            situ_linear_beta=text.get("activation_situ_linear_beta"),
            attn_res_block_size=text.get("attn_res_block_size"),
            bos_token_id=token("bos_token_id"),
            eos_token_id=token("eos_token_id"),
            pad_token_id=token("pad_token_id"),
            quant_method=quantization.get("quant_method"),
        )


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """The parsed config.json of a model directory; ConfigError says which part is missing."""
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise ConfigError(f"model: {model_dir} is not a directory; pass a checkpoint directory")
    if not path.is_file():
        raise ConfigError(f"model: {path} is missing; {model_dir} is not a checkpoint directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} must hold an object, got {type(config).__name__}")
    return config


def _with_aliases(text: Mapping[str, Any]) -> dict[str, Any]:
    """Kimi-Linear releases spell three keys differently."""
    aliases = {
        "model_max_length": "max_position_embeddings",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    return {aliases.get(key, key): value for key, value in text.items()}


def _check_keys(text: Mapping[str, Any]) -> None:
    problems = [
        f"{key} is missing" for key in (*_REQUIRED, "num_experts_per_token") if key not in text
    ]
    for key, allowed in _FIXED.items():
        if key in text and text[key] not in allowed:
            problems.append(f"{key}={text[key]!r} is not supported; expected {allowed[0]!r}")
    known = {*_READ, *_FIXED} | _INERT
    problems += [
        f"{key}={value!r} is unknown and could change the forward"
        for key, value in text.items()
        if key not in known
    ]
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        needed = ("num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers")
        problems += [f"linear_attn_config.{key} is missing" for key in needed if key not in linear]
        problems += [
            f"linear_attn_config.{key}={value!r} is unknown and could change the forward"
            for key, value in linear.items()
            if key not in _LINEAR_READ
        ]
    elif "linear_attn_config" in text:
        problems.append("linear_attn_config must be an object")
    problems += [
        f"{key}={text[key]!r} must be a positive integer"
        for key in _REQUIRED
        if key in text and key != "linear_attn_config" and not _is_positive(text[key])
    ]
    if problems:
        raise ConfigError("config.json: " + "; ".join(problems))


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mla_layers(linear: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """0-based MLA layers from the published 1-based lists, which must cover every layer once."""
    full = sorted(layer - 1 for layer in linear["full_attn_layers"])
    kda = sorted(layer - 1 for layer in linear.get("kda_layers", []))
    if "kda_layers" in linear and sorted(full + kda) != list(range(num_layers)):
        raise ConfigError(
            "linear_attn_config: full_attn_layers and kda_layers (1-based) must list each of "
            f"the {num_layers} layers exactly once"
        )
    if full and not 0 <= full[0] <= full[-1] < num_layers:
        raise ConfigError(f"linear_attn_config.full_attn_layers: outside 1..{num_layers}")
    return tuple(full)
