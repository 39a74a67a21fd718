"""Which keys of a config.json are read, which are inert, and what their values may be.

A key that is not listed here and could change the forward is refused.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tercel.errors import ConfigError

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
    "num_experts_per_token",
    "linear_attn_config",
)
_READ = (
    *_REQUIRED,
    "rms_norm_eps",
    "q_lora_rank",
    "mla_use_output_gate",
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
_LINEAR_REQUIRED = ("num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers")
_LINEAR_READ = (*_LINEAR_REQUIRED, "use_full_rank_gate", "gate_lower_bound", "kda_layers")
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Kimi-Linear releases spell three keys differently."""
_LARGEST = 2**31 - 1


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _is_count(value: object) -> bool:
    return (value == 0 and type(value) is int) or _is_size(value)


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def is_positive(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]


def _is_negative(value: object) -> bool:
    return is_number(value) and value < 0  # type: ignore[operator]


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and all(_is_size(layer) for layer in value)


Kind = tuple[Callable[[object], bool], str]
SIZE: Kind = (_is_size, "a positive integer")
COUNT: Kind = (_is_count, "an integer from 0")
FLAG: Kind = (lambda value: type(value) is bool, "true or false")
POSITIVE: Kind = (is_positive, "a positive number")
_LAYERS: Kind = (_is_layers, "a list of layer numbers from 1")
OBJECT: Kind = (lambda value: isinstance(value, dict), "an object")
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(_REQUIRED, SIZE),
    "linear_attn_config": OBJECT,
    "q_lora_rank": SIZE,
    "routed_expert_hidden_size": SIZE,
    "attn_res_block_size": SIZE,
    "max_position_embeddings": SIZE,
    "num_key_value_heads": SIZE,
    "first_k_dense_replace": (_is_count, "a layer number from 0"),
    "rms_norm_eps": POSITIVE,
    "routed_scaling_factor": POSITIVE,
    "activation_situ_beta": POSITIVE,
    "activation_situ_linear_beta": POSITIVE,
    "mla_use_output_gate": FLAG,
    "latent_moe_use_norm": FLAG,
    "moe_renormalize": FLAG,
    "quantization_config": OBJECT,
}
_LINEAR_KINDS: Mapping[str, Kind] = {
    "num_heads": SIZE,
    "head_dim": SIZE,
    "short_conv_kernel_size": SIZE,
    "use_full_rank_gate": FLAG,
    "gate_lower_bound": (_is_negative, "a negative number"),
    "full_attn_layers": _LAYERS,
    "kda_layers": _LAYERS,
}
_NULLABLE = frozenset(
    """q_lora_rank routed_expert_hidden_size attn_res_block_size activation_situ_beta
    activation_situ_linear_beta gate_lower_bound quantization_config""".split()
)
"""null says what leaving the key out says."""


def with_aliases(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under one spelling each.

    Raises:
        ConfigError: two spellings of one key disagree.
    """
    spelled: dict[str, Any] = {}
    for name, value in text.items():
        key = _ALIASES.get(name, name)
        if key in spelled and spelled[key] != value:
            raise ConfigError(
                f"config.json: {key} is given twice, as {spelled[key]!r} and as {value!r}"
            )
        spelled[key] = value
    return spelled


def check_outer_keys(config: Mapping[str, Any]) -> None:
    """Checks what stands beside text_config.

    Raises:
        ConfigError: every key that is wrong, and why.
    """
    known = {"quantization_config": OBJECT}
    _raise([*_unsupported(config), *_unknown(config, known), *mistyped(config, known)])


def check_keys(text: Mapping[str, Any]) -> None:
    """Checks the text model's keys, under their K3 spelling.

    Raises:
        ConfigError: every key that is missing or wrong, and why.
    """
    linear = text.get("linear_attn_config")
    prefix = "linear_attn_config."
    problems = [
        *(f"{key} is missing" for key in _REQUIRED if key not in text),
        *_unsupported(text),
        *_unknown(text, _READ),
        *mistyped(text, _KINDS),
    ]
    if isinstance(linear, Mapping):
        problems += [f"{prefix}{key} is missing" for key in _LINEAR_REQUIRED if key not in linear]
        problems += _unknown(linear, _LINEAR_READ, prefix, inert=frozenset())
        problems += mistyped(linear, _LINEAR_KINDS, prefix)
    _raise(problems)
    heads = text["num_attention_heads"]
    if (kv_heads := text.get("num_key_value_heads", heads)) != heads:
        _raise([f"num_key_value_heads={kv_heads} is not supported; expected {heads}, one per head"])


def _unsupported(keys: Mapping[str, Any]) -> Iterator[str]:
    for key, allowed in _FIXED.items():
        if key in keys and keys[key] not in allowed:
            yield f"{key}={keys[key]!r} is not supported; expected {allowed[0]!r}"


def _unknown(
    keys: Mapping[str, Any],
    read: Collection[str],
    prefix: str = "",
    inert: Collection[str] = _INERT | _FIXED.keys(),
) -> Iterator[str]:
    for key, value in keys.items():
        if key not in read and key not in inert:
            yield f"{prefix}{key}={value!r} is unknown and could change the forward"


def mistyped(keys: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str = "") -> Iterator[str]:
    for key, (is_right, expected) in kinds.items():
        if key in keys and not ((keys[key] is None and key in _NULLABLE) or is_right(keys[key])):
            yield f"{prefix}{key}={keys[key]!r} must be {expected}"


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("config.json: " + "; ".join(problems))
