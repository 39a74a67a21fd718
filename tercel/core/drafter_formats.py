"""Reads the published formats of drafters: SpecForge and DeepSpec, speculators, K3DSparkModel.

Switches may stand at the top level, in `dflash_config` or in `dspark_config`, and under several
names. They are brought to one flat set of keys first; two values for one key are refused, and so is
a key that is not known and could change what the drafter computes.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tercel.core.config_keys import (
    COUNT,
    FLAG,
    OBJECT,
    POSITIVE,
    SIZE,
    TRANSFORMERS_KEYS,
    Kind,
    is_number,
    is_positive,
    mistyped,
)
from tercel.core.drafter import DrafterConfig, GqaShape, MlaShape, TapStream
from tercel.core.model import read_config_json
from tercel.core.rope import Rope, Yarn
from tercel.errors import ConfigError

Keys = dict[str, Any]

_ALIASES = {
    "use_confidence_head": "enable_confidence_head",
    "confidence_head": "enable_confidence_head",
    "shift_label": "sample_from_anchor",
    "is_causal": "causal",
    "swa_window_size": "sliding_window",
    "use_swa": "use_sliding_window",
}
_COMMON = frozenset(
    """hidden_size vocab_size num_hidden_layers intermediate_size num_attention_heads rms_norm_eps
    max_position_embeddings rope_parameters rope_scaling rope_theta target_hidden_size
    num_target_layers block_size mask_token_id markov_rank enable_confidence_head
    confidence_head_with_markov confidence_temperatures sample_from_anchor causal aux_hidden_stream
    num_key_value_heads target_layer_ids target_fingerprint""".split()
)
_QWEN3 = frozenset(
    "head_dim layer_types sliding_window use_sliding_window rope_is_neox_style".split()
)
_MLA = frozenset(
    """q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave
    target_num_hidden_layers fc_norm""".split()
)
_SPECULATORS = frozenset(
    "aux_hidden_state_layer_ids sliding_window_non_causal speculators_model_type".split()
)
_INERT = TRANSFORMERS_KEYS | frozenset(
    """tie_word_embeddings max_window_layers num_anchors max_anchors confidence_head_alpha
    ce_loss_alpha l1_loss_alpha speculators_version speculators_config
    _torchspec_version""".split()
)
"""How the drafter was trained, and what its files carry without using it."""
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_sink_bias": False,
    "attention_mode": "gqa",
    "use_aux_hidden_state": True,
    "markov_head_type": "vanilla",
    "enable_correction_head": False,
    "dflash_context_residual": False,
    "dflash_block_position_embedding": False,
    "dflash_gated_layer_fusion": False,
    "dflash2_dynamic_conv": False,
    "dflash2_candidate_selector": False,
    "quantization_config": None,
    "compression_config": None,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "mla_use_qk_norm": False,
}
"""Keys that change the forward, and the one value of each that is computed here."""
_NESTED = ("dflash_config", "dspark_config")


def _list_of(is_right: Callable[[object], bool], what: str, least: int = 1) -> Kind:
    def check(value: object) -> bool:
        return isinstance(value, list) and len(value) >= least and all(map(is_right, value))

    return check, f"a list of {what}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_IDS = _list_of(lambda value: type(value) is int, "layer numbers")
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        """hidden_size vocab_size num_hidden_layers intermediate_size num_attention_heads head_dim
        num_key_value_heads max_position_embeddings target_hidden_size num_target_layers block_size
        target_num_hidden_layers""".split(),
        SIZE,
    ),
    **dict.fromkeys("mask_token_id markov_rank sliding_window".split(), COUNT),
    **dict.fromkeys("rms_norm_eps rope_theta".split(), POSITIVE),
    **dict.fromkeys(
        """enable_confidence_head confidence_head_with_markov sample_from_anchor causal fc_norm
        use_sliding_window sliding_window_non_causal rope_is_neox_style rope_interleave""".split(),
        FLAG,
    ),
    **dict.fromkeys("rope_parameters rope_scaling".split(), OBJECT),
    **dict.fromkeys("target_layer_ids aux_hidden_state_layer_ids".split(), _IDS),
    **dict.fromkeys("aux_hidden_stream target_fingerprint".split(), (_is_text, "a string")),
    "layer_types": _list_of(_is_text, "strings"),
    "confidence_temperatures": _list_of(is_positive, "positive numbers", 0),
}
"""null says what leaving the key out says."""
_OF_SWITCHES = ("dflash2_", "correction_")
"""How the sizes of parts begin that the switches above leave out."""
_STREAMS = {
    "attn_res": TapStream.MIXTURE,
    "mixture": TapStream.MIXTURE,
    "prefix": TapStream.PREFIX,
    "prefix_only": TapStream.PREFIX,
}
_ANCHORED = ("DSparkDraftModel", "Qwen3DSparkModel")
"""SpecForge's and DeepSpec's names; both train the anchor's slot, with or without heads."""
_MASKED = ("DFlashDraftModel",)
_K3_BLOCK_SIZE = 7
"""K3DSparkModel checkpoints that do not say were trained with seven slots."""


def read_drafter_config(drafter_dir: Path) -> DrafterConfig:
    """Reads `drafter_dir`/config.json; raises ConfigError naming the file and the key."""
    return drafter_config(read_config_json(drafter_dir, "drafter"))


def drafter_config(config: Mapping[str, Any]) -> DrafterConfig:
    """From a parsed config.json of any of the formats; raises ConfigError listing all problems."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(map(_is_text, architectures)):
        raise ConfigError(f"drafter config.json: architectures={architectures!r} must name classes")
    if config.get("model_type") == "k3_dspark" or architectures == ["K3DSparkModel"]:
        return _k3_dspark(config)
    if "speculators_model_type" in config:
        return _speculators(config)
    if config.get("model_type") == "qwen3" and set(architectures) <= {*_ANCHORED, *_MASKED}:
        return _specforge(config)
    raise ConfigError(
        f"drafter: model_type {config.get('model_type')!r} with architectures {architectures} is "
        f"not a known drafter; expected k3_dspark, a speculators config, or qwen3 with one of "
        f"{', '.join((*_ANCHORED, *_MASKED))}"
    )


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is of any of the formats, be it right or wrong."""
    return config.get("model_type") in ("k3_dspark", "qwen3") or "speculators_model_type" in config


def _specforge(config: Mapping[str, Any]) -> DrafterConfig:
    keys, problems = _flatten(config)
    architecture = (config.get("architectures") or [""])[0]
    projector = keys.pop("projector_type", None)
    if projector not in (None, "dflash", "dspark"):
        problems.append(f"projector_type={projector!r} is not supported; expected dspark or dflash")
    if architecture or projector:
        anchored = architecture in _ANCHORED or projector == "dspark"
        keys.setdefault("sample_from_anchor", anchored)
    sliding = "sliding_attention" in (keys.get("layer_types") or [])
    if sliding and keys.get("use_sliding_window", True) and "causal" not in keys:
        problems.append("causal is missing: say whether a sliding layer is causal in its block")
    last = (keys.get("num_target_layers") or 0) - 1
    if last in (keys.get("target_layer_ids") or []):
        problems.append(f"target_layer_ids: the row after the last layer ({last}) is ambiguous")
    _check(keys, _COMMON | _QWEN3, problems)
    causal = bool(keys.get("causal", False))
    return _build(keys, problems, attention=_gqa, layer_causal=lambda window: causal)


def _speculators(config: Mapping[str, Any]) -> DrafterConfig:
    kind, inner = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in ("dspark", "dflash") or not isinstance(inner, Mapping):
        raise ConfigError(
            f"drafter: speculators_model_type={kind!r} is not supported; expected dspark or "
            "dflash, with a transformer_layer_config"
        )
    outer = {key: value for key, value in config.items() if key != "transformer_layer_config"}
    keys, problems = _flatten(outer, dict(inner))
    if inner.get("model_type", "qwen3") != "qwen3":
        problems.append(f"model_type={inner['model_type']!r} is not supported; expected qwen3")
    # A file holds what differs from the defaults of its class.
    defaults = {"markov_rank": 256, "enable_confidence_head": True, "sample_from_anchor": True}
    for key, value in (defaults if kind == "dspark" else dict.fromkeys(defaults, False)).items():
        keys.setdefault(key, value)
    keys.setdefault("head_dim", 128)
    keys.setdefault("rms_norm_eps", 1e-6)
    keys.setdefault("max_position_embeddings", 32768)
    ids = keys.get("aux_hidden_state_layer_ids")
    if isinstance(ids, list):
        keys["target_layer_ids"] = [tap - 1 for tap in ids]
    _check(keys, (_COMMON - {"causal"}) | _QWEN3 | _SPECULATORS, problems)
    non_causal = bool(keys.get("sliding_window_non_causal", False))
    return _build(
        keys,
        problems,
        attention=_gqa,
        layer_causal=lambda window: window is not None and not non_causal,
        window_from_anchor=True,
    )


def _k3_dspark(config: Mapping[str, Any]) -> DrafterConfig:
    keys, problems = _flatten(config)
    keys.setdefault("block_size", _K3_BLOCK_SIZE)
    keys.setdefault("sample_from_anchor", True)
    keys.setdefault("aux_hidden_stream", "prefix")
    taps = keys.get("target_layer_ids") or []
    count = keys.pop("num_target_layers", len(taps))
    if count != len(taps):
        problems.append(f"num_target_layers={count}, target_layer_ids names {len(taps)} layers")
    keys["num_target_layers"] = keys.get("target_num_hidden_layers")
    _check(keys, _COMMON | _MLA, problems)
    causal = bool(keys.get("causal", False))
    return _build(keys, problems, attention=_mla, layer_causal=lambda window: causal)


def _flatten(*levels: Mapping[str, Any]) -> tuple[Keys, list[str]]:
    """One value per key over the levels and what is nested in them, and the contradictions.

    Raises:
        ConfigError: lists the values of another type than their key's.
    """
    keys: Keys = {}
    problems: list[str] = []
    for level in levels:
        _refuse_mistyped(level, dict.fromkeys(_NESTED, OBJECT))
    nested = [level[name] for level in levels for name in _NESTED if level.get(name)]
    for level in (*levels, *nested):
        for key, value in level.items():
            if key in _NESTED:
                continue
            if key == "dspark_bonus_anchor":
                key, value = "sample_from_anchor", not value
            name = _ALIASES.get(key, key)
            if name not in keys or keys[name] is None or name in TRANSFORMERS_KEYS:
                keys[name] = value
            elif value is not None and keys[name] != value:
                problems.append(f"{name} is declared twice, as {keys[name]!r} and as {value!r}")
    _refuse_mistyped(keys, _KINDS)
    return keys, problems


def _refuse_mistyped(keys: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    said = {key: value for key, value in keys.items() if value is not None}
    if problems := list(mistyped(said, kinds)):
        raise ConfigError("drafter config.json: " + "; ".join(problems))


def _check(keys: Keys, known: Iterable[str], problems: list[str]) -> None:
    """Adds a problem for everything that is missing, unknown, or has a value not computed here."""
    required = ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"]
    required += ["num_attention_heads", "rms_norm_eps", "max_position_embeddings"]
    required += ["block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor"]
    problems += [f"{key} is missing" for key in required if keys.get(key) is None]
    vocabulary = keys.pop("draft_vocab_size", None)
    if vocabulary not in (None, keys.get("vocab_size")):
        problems.append(f"draft_vocab_size={vocabulary}: a reduced vocabulary is not supported")
    for key, value in keys.items():
        if key in _FIXED:
            if value != _FIXED[key] and not (key == "markov_head_type" and value is None):
                problems.append(f"{key}={value!r} is not supported; expected {_FIXED[key]!r}")
        elif key not in known and key not in _INERT and not key.startswith(_OF_SWITCHES):
            problems.append(f"{key}={value!r} is unknown and could change what is drafted")
    stream = keys.get("aux_hidden_stream", "mixture")
    if stream not in _STREAMS:
        problems.append(f"aux_hidden_stream={stream!r} is unknown; expected attn_res or prefix")
    taps = keys.get("target_layer_ids") or [0]
    if min(taps) < 0 or taps != sorted(set(taps)):
        problems.append(f"target_layer_ids: {taps} must ascend and be outputs of layers, 0 or more")
    mask, vocabulary = keys.get("mask_token_id"), keys.get("vocab_size")
    if isinstance(mask, int) and isinstance(vocabulary, int) and not 0 <= mask < vocabulary:
        problems.append(f"mask_token_id={mask} is outside the vocabulary of {vocabulary}")


def _build(
    keys: Keys,
    problems: list[str],
    *,
    attention: Callable[[Keys, list[str]], tuple[GqaShape | MlaShape, Rope] | None],
    layer_causal: Callable[[int | None], bool],
    window_from_anchor: bool = False,
) -> DrafterConfig:
    windows = _windows(keys, problems)
    shape = attention(keys, problems)
    markov_rank = int(keys.get("markov_rank") or 0)
    confidence = bool(keys.get("enable_confidence_head") or False)
    with_markov = bool(keys.get("confidence_head_with_markov", markov_rank > 0)) and confidence
    if with_markov and not markov_rank:
        problems.append("confidence_head_with_markov needs a markov_rank above 0")
    if problems or shape is None:
        raise ConfigError("drafter config.json: " + "; ".join(problems))
    return DrafterConfig(
        hidden_size=keys["hidden_size"],
        vocab_size=keys["vocab_size"],
        num_hidden_layers=keys["num_hidden_layers"],
        intermediate_size=keys["intermediate_size"],
        rms_norm_eps=keys["rms_norm_eps"],
        max_position_embeddings=keys["max_position_embeddings"],
        attention=shape[0],
        rope=shape[1],
        windows=windows,
        window_from_anchor=window_from_anchor,
        causal=tuple(layer_causal(window) for window in windows),
        target_hidden_size=keys.get("target_hidden_size") or keys["hidden_size"],
        target_num_layers=keys.get("num_target_layers"),
        target_fingerprint=keys.get("target_fingerprint"),
        taps=tuple(keys["target_layer_ids"]),
        tap_stream=_STREAMS[keys.get("aux_hidden_stream", "mixture")],
        fc_norm=bool(keys.get("fc_norm", False)),
        block_size=keys["block_size"],
        anchor_predicts=bool(keys["sample_from_anchor"]),
        mask_token_id=keys["mask_token_id"],
        markov_rank=markov_rank,
        confidence_head=confidence,
        confidence_with_markov=with_markov,
        confidence_temperatures=tuple(keys.get("confidence_temperatures") or ()),
    )


def _windows(keys: Keys, problems: list[str]) -> tuple[int | None, ...]:
    """Per layer: the window, or None. Raises nothing; a layer of unknown type is a problem."""
    count = keys.get("num_hidden_layers") or 0
    types = keys.get("layer_types")
    slides = bool(keys.get("use_sliding_window", types is not None))
    if types is None:
        types = ["sliding_attention" if slides else "full_attention"] * count
    known = {"full_attention", "sliding_attention"}
    if len(types) != count or not set(types) <= known:
        problems.append(f"layer_types: {types} must name {count} full or sliding layers")
    window = keys.get("sliding_window")
    if slides and "sliding_attention" in types and not window:
        problems.append("sliding_window is missing, layer_types has sliding layers")
    return tuple(window if slides and kind == "sliding_attention" else None for kind in types)


def _gqa(keys: Keys, problems: list[str]) -> tuple[GqaShape, Rope] | None:
    heads, kv_heads = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    head_dim = keys.get("head_dim")
    if not heads or not kv_heads or not head_dim or heads % kv_heads or head_dim % 2:
        problems.append(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}: "
            "heads must divide by KV heads, and channels by two"
        )
        return None
    interleaved = not keys.get("rope_is_neox_style", True)
    return GqaShape(heads, kv_heads, head_dim), _rope(keys, head_dim, interleaved, problems)


def _mla(keys: Keys, problems: list[str]) -> tuple[MlaShape, Rope] | None:
    names = "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim"
    sizes = [keys.get(name) for name in (*names.split(), "v_head_dim")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        problems.append(f"{names} v_head_dim: {sizes} must all be positive integers")
        return None
    shape = MlaShape(*sizes)  # type: ignore[arg-type]
    interleaved = bool(keys.get("rope_interleave", True))
    return shape, _rope(keys, shape.qk_rope_head_dim, interleaved, problems)


def _rope(keys: Keys, dim: int, interleaved: bool, problems: list[str]) -> Rope:
    parameters = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", keys.get("rope_theta", 10000.0))
    if not is_positive(theta):
        problems.append(f"rope_theta={theta!r} must be a positive number")
        return Rope(dim, 10000.0, interleaved)
    theta = float(theta)
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind == "default" and not parameters:
        return Rope(dim, theta, interleaved)
    fields = {"original_max_position_embeddings": "original_max_position"}
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    fields |= {name: name for name in names}
    unknown = sorted(parameters.keys() - fields.keys())
    if kind not in ("yarn", "deepseek_yarn") or unknown:
        problems.append(f"rope_parameters: type {kind!r} with {unknown} is not supported; use yarn")
        return Rope(dim, theta, interleaved)
    missing = {"factor", "original_max_position_embeddings"} - parameters.keys()
    if missing:
        problems.append(f"rope_parameters: yarn needs {', '.join(sorted(missing))}")
        return Rope(dim, theta, interleaved)
    said = {name: value for name, value in parameters.items() if value is not None}
    wrong = [f"{name}={value!r}" for name, value in said.items() if not is_number(value)]
    if wrong:
        problems.append(f"rope_parameters: {', '.join(wrong)} must be numbers")
        return Rope(dim, theta, interleaved)
    yarn = Yarn(**{fields[name]: value for name, value in said.items()})
    return Rope(dim, theta, interleaved, yarn)
