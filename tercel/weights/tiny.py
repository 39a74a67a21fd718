"""Configurations of small models in the published form: real head sizes, everything else small."""

from collections.abc import Mapping
from typing import Any

from tercel.core.config_keys import check_keys, with_aliases
from tercel.errors import ConfigError
from tercel.weights.manifest import manifest_from_config
from tercel.weights.published import published_config

FAMILIES = ("kimi_k3", "kimi_linear")

_TINY: Mapping[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 128,
    "linear_attn_config.num_heads": 4,
}
_TINY_K3: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "q_lora_rank": 128,
    "routed_expert_hidden_size": 128,
    "attn_res_block_size": 2,
}
_LARGE: Mapping[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
}


def tiny_config(
    family: str,
    vocab_size: int,
    *,
    size_bytes: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A config.json of `family` with 256 special slots at the end of `vocab_size` tokens.

    Args:
        size_bytes: bytes of tensors to come close to, from a wider model with enough experts.
        changes: keys of the text model, dotted within linear_attn_config, e.g.
            {"num_experts": 8, "linear_attn_config.head_dim": 32}. The layers that are MLA follow
            from num_hidden_layers unless they are given.
    Raises:
        ConfigError: the family or a key of `changes` is unknown, or a value is wrong.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family: {family!r} is unknown; there is {', '.join(FAMILIES)}")
    wide = _LARGE if size_bytes is not None else {}
    if family == "kimi_k3":
        config = published_config("kimi_k3_mxfp4")
        del config["vision_config"]
        values = {**_TINY, **_TINY_K3, **wide}
        if size_bytes is not None:
            values["routed_expert_hidden_size"] = 1024
    else:
        config = published_config("kimi_linear_48b")
        values = {**_TINY, "model_max_length": 8192, **wide}
    text = config.get("text_config", config)
    _apply(text, {**values, "vocab_size": vocab_size, **(changes or {})})
    check_keys(with_aliases(text))
    _list_layers(text, changes or {})
    base = vocab_size - 256
    for level in (config, text):
        tokens = {"bos_token_id": base, "eos_token_id": base + 2, "pad_token_id": base + 255}
        level.update(tokens)
    if family == "kimi_k3":
        config["media_placeholder_token_id"] = base + 21
    if size_bytes is not None:
        text["num_experts"] = _experts_for(config, text, size_bytes)
    return config


def _apply(text: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        *outer, key = name.split(".")
        level = text
        for part in outer:
            inner = level.get(part)
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}: the config has no object {part!r}")
            level = inner
        level[key] = value


def _list_layers(text: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Every third layer and the last two MLA: interleaved, then an MLA pair as in K3. 1-based."""
    count, linear = text["num_hidden_layers"], text["linear_attn_config"]
    if "linear_attn_config.full_attn_layers" not in changes:
        linear["full_attn_layers"] = sorted({*range(3, count + 1, 3), count - 1, count} - {0})
    full = linear["full_attn_layers"]
    linear["kda_layers"] = [layer for layer in range(1, count + 1) if layer not in full]


def _experts_for(config: dict[str, Any], text: dict[str, Any], size_bytes: int) -> int:
    """Bytes grow linearly with the number of experts: two manifests give the line."""
    sizes = []
    for text["num_experts"] in (4, 8):
        sizes.append(manifest_from_config(config).num_bytes)
    per_expert = (sizes[1] - sizes[0]) / 4
    return max(4, 4 + round((size_bytes - sizes[0]) / per_expert))
