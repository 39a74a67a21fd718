"""What config.json says about quantization: read by manifests, written by conversions.

Sources: Kimi K3 config.json (compressed-tensors `mxfp4-pack-quantized`, inside text_config); NVIDIA
Model Optimizer's K3 conversion (`modelopt_mixed`, at the top level and in hf_quant_config.json).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.rows import Source
from tercel.weights.table import Family, model_table

ROUTED, ATTENTION, DENSE = "routed experts", "attention projections", "other matrices"
"""Kinds of matrices that formats tell apart."""

COMPRESSED = {"mxfp4-pack-quantized": "mxfp4"}
"""Formats of compressed-tensors that are read."""
_MODELOPT = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "FP8_PB_WO": "fp8_block"}
_NVFP4_BLOCK = 16
_PRODUCER = {"name": "modelopt", "version": "tercel"}
"""Loaders look for the name."""
_UNQUANTIZED = (
    "*block_sparse_moe.gate*",
    "*block_sparse_moe.routed_expert*",
    "*block_sparse_moe.shared_experts*",
    "*conv1d*",
    "*norm*",
    "*_res_proj*",
    "*embed_tokens*",
    "*lm_head*",
    "vision_tower*",
    "mm_projector*",
)


@dataclass(frozen=True)
class Matrix:
    """A two-dimensional weight that formats store in different ways."""

    key: str
    """Without `.weight`."""
    kind: str
    shape: tuple[int, ...]

    @property
    def bank(self) -> str:
        """Of a routed expert's matrix: the name of all experts of its layer."""
        return self.key.rsplit(".", 2)[0]


def matrices(config: ModelConfig, family: Family) -> Iterator[Matrix]:
    """Every matrix of the layers, each once."""
    seen: set[str] = set()
    for path, row in model_table(config, family, lambda key: "plain").rows():
        kind = _kind(path)
        for key, source in row.stored():
            if kind is not None and key not in seen and _is_matrix(source):
                seen.add(key)
                yield Matrix(key.removesuffix(".weight"), kind, source.shape)


def _kind(path: str) -> str | None:
    """Of a field such as layers.3.attention.proj; None: not a matrix of a layer."""
    if ".experts." in path:
        return ROUTED
    if ".attention." in path:
        return ATTENTION
    return DENSE if ".mlp." in path else None


def _is_matrix(source: Source) -> bool:
    return len(source.shape) == 2 and source.key.endswith(".weight")


def declared_format(config_json: Mapping[str, Any]) -> Callable[[str], str]:
    """Matrix key -> the format that a config.json declares for it.

    Raises:
        ConfigError: it declares a quantization that is not known.
    """
    text = config_json.get("text_config", config_json)
    declared = text.get("quantization_config") or config_json.get("quantization_config")
    if not declared:
        return lambda key: "plain"
    if declared.get("quant_method") == "modelopt_mixed":
        return _declared_by_layer(declared.get("quantized_layers", {}))
    name = declared.get("format")
    if name not in COMPRESSED:
        known = ", ".join(COMPRESSED)
        raise ConfigError(f"quantization_config.format={name!r} is unknown; expected {known}")
    return lambda key: COMPRESSED[name]


def _declared_by_layer(layers: Mapping[str, Any]) -> Callable[[str], str]:
    """Layers are named one by one, routed experts by their bank."""
    formats = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo")
        if algorithm not in _MODELOPT:
            known = ", ".join(_MODELOPT)
            raise ConfigError(
                f"quantized_layers.{name}.quant_algo={algorithm!r} is unknown; expected {known}"
            )
        formats[name] = _MODELOPT[algorithm]
    return lambda key: formats.get(key) or formats.get(key.rsplit(".", 2)[0], "plain")


def without_quantization(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that declares plain weights."""
    config = copy.deepcopy(dict(config_json))
    for level in (config, config.get("text_config", {})):
        level.pop("quantization_config", None)
    return config


def with_mxfp4(config_json: Mapping[str, Any], declaration: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that declares MXFP4 experts, with the published block `declaration`."""
    config = without_quantization(config_json)
    config.get("text_config", config)["quantization_config"] = copy.deepcopy(dict(declaration))
    return config


def with_nvfp4(
    config_json: Mapping[str, Any], quantized: Sequence[Matrix]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, hf_quant_config.json) that declare NVFP4 experts and FP8 for the other
    `quantized` matrices."""
    layers: dict[str, dict[str, Any]] = {}
    for matrix in quantized:
        if matrix.kind == ROUTED and matrix.bank in layers:
            continue
        if matrix.kind == ROUTED:
            entry: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": _NVFP4_BLOCK}
            names: Iterable[str] = (matrix.bank,)
        else:
            entry, names = {"quant_algo": "FP8_PB_WO"}, _with_fused(matrix.key)
        layers |= {alias: entry for name in names for alias in _aliases(name)}
    text = config_json.get("text_config", config_json)
    dense = range(text.get("first_k_dense_replace", 0))
    unquantized = [*_UNQUANTIZED, *(f"*layers.{layer}.mlp.*" for layer in dense)]
    if all(matrix.kind == ROUTED for matrix in quantized):
        unquantized.append("*self_attn*")
    ignored = [alias for pattern in unquantized for alias in _aliases(pattern)]
    config = without_quantization(config_json)
    config["quantization_config"] = {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "producer": _PRODUCER,
        "config_groups": _groups(layers),
        "quantized_layers": layers,
        "ignore": ignored,
    }
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": _NVFP4_BLOCK,
        "quantized_layers": layers,
        "exclude_modules": ignored,
    }
    return config, {"producer": _PRODUCER, "quantization": quantization}


def _groups(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One group per algorithm, as compressed-tensors spells them."""
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": _NVFP4_BLOCK}
    spelled: dict[str, dict[str, Any]] = {
        "NVFP4": {"input_activations": bits, "weights": bits},
        "FP8_PB_WO": {"quant_algo": "FP8_PB_WO"},
    }
    used = dict.fromkeys(layer["quant_algo"] for layer in layers.values())
    return {
        f"group_{index}": {
            **spelled[algorithm],
            "targets": [name for name, layer in layers.items() if layer["quant_algo"] == algorithm],
        }
        for index, algorithm in enumerate(used)
    }


def _aliases(name: str) -> list[str]:
    """The spellings of one module under which engines look it up: with and without the wrapper's
    prefixes, the mixture of experts by either name."""
    spelled = [name]
    for prefix in ("language_model.", "model."):
        if spelled[-1].startswith(prefix):
            spelled.append(spelled[-1].removeprefix(prefix))
    renamed = [each.replace("block_sparse_moe", "mlp") for each in spelled]
    return list(dict.fromkeys(spelled + renamed))


_FUSED = {
    "fused_qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"),
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Names of projections that engines fuse -> what they fuse."""


def _with_fused(key: str) -> list[str]:
    """A projection's name, and those of the fused ones that it is part of."""
    parent, _, name = key.rpartition(".")
    return [key, *(f"{parent}.{fused}" for fused, parts in _FUSED.items() if name in parts)]
