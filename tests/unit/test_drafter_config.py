"""Published configurations of drafters, and what is refused by name."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tercel.core.drafter import DrafterConfig, GqaShape, MlaShape, TapStream
from tercel.core.drafter_formats import drafter_config, read_drafter_config
from tercel.core.model import ModelConfig
from tercel.core.rope import Rope, Yarn
from tercel.errors import ConfigError
from tercel.reference.drafter import inverse_frequencies, rotation_scale, softmax_scale
from tercel.weights.published import published_config
from tests.drafters import K3_DSPARK, SPECFORGE, SPECULATORS
from training.dspark.drafter import reference_config

PUBLISHED = {"specforge": SPECFORGE, "speculators": SPECULATORS, "k3_dspark": K3_DSPARK}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with keys set; `a__b` sets b in a, and a value of ... removes the key."""
    copied = copy.deepcopy(config)
    for name, value in changes.items():
        *outer, key = name.split("__")
        level = copied
        for part in outer:
            level = level[part]
        if value is ...:
            del level[key]
        else:
            level[key] = value
    return copied


def test_specforge() -> None:
    c = drafter_config(SPECFORGE)
    assert c.attention == GqaShape(64, 16, 64)
    assert c.attention.entry_shape(16) == (2, 1, 64)
    assert c.taps == (7, 23, 51, 67, 83) and c.tap_stream is TapStream.MIXTURE
    assert c.rope == Rope(64, 1e4, False, Yarn(16.0, 65536))
    assert c.windows == (None,) * 5 and c.causal == (False,) * 5
    assert (c.anchor_predicts, c.block_size, c.max_drafts) == (True, 7, 7)
    assert (c.mask_token_id, c.markov_rank) == (163824, 256)
    assert c.confidence_head and c.confidence_with_markov and not c.fc_norm


def test_speculators() -> None:
    c = drafter_config(SPECULATORS)
    assert c.attention == GqaShape(96, 16, 64)
    assert c.taps == (23, 47, 71, 87, 91), "ids of inputs are brought to outputs"
    assert c.windows == (2048,) * 5 and c.window_from_anchor
    assert c.causal == (True,) * 5
    assert c.max_drafts == 8 and c.anchor_predicts and c.confidence_head
    full = changed(SPECULATORS, sliding_window_non_causal=True)
    assert drafter_config(full).causal == (False,) * 5
    types = ["full_attention", *["sliding_attention"] * 4]
    mixed = drafter_config(changed(SPECULATORS, transformer_layer_config__layer_types=types))
    assert mixed.causal == (False, True, True, True, True)
    masked = drafter_config(changed(SPECULATORS, sample_from_anchor=False))
    assert not masked.anchor_predicts and masked.max_drafts == 7
    dflash = changed(SPECULATORS, speculators_model_type="dflash", markov_rank=...)
    dflash = drafter_config(changed(dflash, sample_from_anchor=...))
    assert (dflash.markov_rank, dflash.anchor_predicts, dflash.confidence_head) == (0, False, False)


def test_k3_dspark() -> None:
    c = drafter_config(K3_DSPARK)
    assert c.attention == MlaShape(64, 1536, 512, 128, 64, 128)
    assert c.attention.entry_shape(16) == (576,)
    assert c.taps == (2, 23, 47, 71, 89) and c.tap_stream is TapStream.PREFIX
    assert c.rope.interleaved and c.rope.theta == 5e4 and c.target_num_layers == 93
    assert c.block_size == 7 and c.anchor_predicts and not c.fc_norm
    trained = drafter_config(changed(K3_DSPARK, fc_norm=True, aux_hidden_stream="attn_res"))
    assert trained.fc_norm and trained.tap_stream is TapStream.MIXTURE
    assert drafter_config(changed(K3_DSPARK, is_causal=True)).causal == (True,) * 5


def test_a_name_does_not_decide_the_slots() -> None:
    """DeepSpec's DFlash has the anchor's convention and no heads; z-lab's has the masked one."""
    bare = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    inner = {f"dflash_config__{key}": value for key, value in bare.items()}
    deepspec = changed(SPECFORGE, architectures=["Qwen3DSparkModel"], **bare, **inner)
    c = drafter_config(changed(deepspec, dflash_config__projector_type=...))
    assert c.anchor_predicts and c.max_drafts == 7 and c.markov_rank == 0
    z_lab = changed(SPECFORGE, architectures=["DFlashDraftModel"], **bare, **inner)
    c = drafter_config(changed(z_lab, dflash_config__projector_type=...))
    assert not c.anchor_predicts and c.max_drafts == 6
    said = changed(z_lab, dflash_config__shift_label=True)
    assert drafter_config(changed(said, dflash_config__projector_type=...)).anchor_predicts
    bonus = changed(K3_DSPARK, dspark_bonus_anchor=True)
    assert not drafter_config(bonus).anchor_predicts


def test_switches_are_found_at_every_level() -> None:
    heads = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov")
    bare = changed(SPECFORGE, **dict.fromkeys(heads, ...))
    bare = changed(bare, **{f"dflash_config__{key}": ... for key in heads})
    assert drafter_config(bare).markov_rank == 0
    values = {"markov_rank": 64, "use_confidence_head": True}
    for spelled in (values, {"dspark_config": values}):
        c = drafter_config({**bare, **spelled})
        assert c.markov_rank == 64 and c.confidence_head and c.confidence_with_markov


REFUSED = {
    "two values": (SPECFORGE, {"markov_rank": 128}, "markov_rank is declared twice"),
    "no mask token": (SPECFORGE, {"dflash_config__mask_token_id": ...}, "mask_token_id is missing"),
    "no taps": (SPECFORGE, {"dflash_config__target_layer_ids": ...}, "target_layer_ids is missing"),
    "mask outside": (SPECFORGE, {"dflash_config__mask_token_id": 163840}, "outside the vocabulary"),
    "last layer": (SPECFORGE, {"dflash_config__target_layer_ids": [7, 92]}, "is ambiguous"),
    "descending": (SPECFORGE, {"dflash_config__target_layer_ids": [7, 3]}, "must ascend"),
    "gated head": (SPECFORGE, {"dflash_config__markov_head_type": "gated"}, "declared twice"),
    "rnn head": (SPECULATORS, {"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
    "bias": (SPECFORGE, {"attention_bias": True}, "attention_bias=True is not supported"),
    "unknown key": (SPECFORGE, {"dflash_config__gru_hidden_dim": 4}, "gru_hidden_dim=4 is unknown"),
    "projector": (SPECFORGE, {"dflash_config__projector_type": "domino"}, "'domino'"),
    "silent slide": (
        SPECFORGE,
        {"layer_types": ["sliding_attention"] * 5, "sliding_window": 8, "use_sliding_window": True},
        "causal is missing",
    ),
    "quantized": (SPECFORGE, {"quantization_config": {"bits": 4}}, "quantization_config"),
    "rope": (SPECFORGE, {"rope_parameters__rope_type": "llama3"}, "'llama3'"),
    "rope key": (SPECFORGE, {"rope_parameters__truncate": False}, "truncate"),
    "input of layer 0": (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 5]}, "outputs of layers"),
    "reduced vocabulary": (SPECULATORS, {"draft_vocab_size": 32000}, "reduced vocabulary"),
    "eagle": (SPECULATORS, {"speculators_model_type": "eagle3"}, "'eagle3'"),
    "other backbone": (SPECULATORS, {"transformer_layer_config__model_type": "llama"}, "'llama'"),
    "correction": (SPECULATORS, {"enable_correction_head": True}, "enable_correction_head=True"),
    "convolution": (SPECULATORS, {"dflash2_dynamic_conv": True}, "dflash2_dynamic_conv=True"),
    "causal twice": (SPECULATORS, {"causal": True}, "causal=True is unknown"),
    "gate": (K3_DSPARK, {"mla_use_output_gate": True}, "mla_use_output_gate=True"),
    "tap count": (K3_DSPARK, {"num_target_layers": 4}, "names 5 layers"),
    "stream": (K3_DSPARK, {"aux_hidden_stream": "attnres"}, "aux_hidden_stream='attnres'"),
    "embedded": (SPECFORGE, {"model_type": "deepseek_v4"}, "not a known drafter"),
    "no list": (SPECFORGE, {"architectures": 5}, "architectures=5 must name classes"),
    "nested list": (SPECFORGE, {"dflash_config": [1]}, "dflash_config=[1] must be an object"),
    "text": (SPECFORGE, {"num_attention_heads": "64"}, "num_attention_heads='64' must be a pos"),
    "no block": (K3_DSPARK, {"block_size": 0}, "block_size=0 must be a positive integer"),
    "a tap": (SPECULATORS, {"aux_hidden_state_layer_ids": 3}, "=3 must be a list of layer numbers"),
    "taps": (SPECFORGE, {"dflash_config__target_layer_ids": []}, "target_layer_ids=[] must be"),
    "nested taps": (SPECFORGE, {"dflash_config__target_layer_ids": "1,3"}, "'1,3' must be a list"),
    "rank": (SPECULATORS, {"markov_rank": "x"}, "markov_rank='x' must be an integer from 0"),
    "epsilon": (K3_DSPARK, {"rms_norm_eps": "a"}, "rms_norm_eps='a' must be a positive number"),
    "angle": (SPECFORGE, {"rope_parameters__rope_theta": "x"}, "rope_theta='x' must be a positive"),
    "scale": (SPECFORGE, {"rope_parameters__factor": "x"}, "factor='x' must be numbers"),
    "layers": (SPECFORGE, {"layer_types": [["full_attention"]]}, "must be a list of strings"),
    "fingerprint": (SPECFORGE, {"target_fingerprint": 7}, "target_fingerprint=7 must be a string"),
    "other class": (SPECFORGE, {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
}


@pytest.mark.parametrize(("config", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        drafter_config(changed(config, **changes))
    assert words in str(error.value)


def test_a_missing_directory_is_named_as_the_drafters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^drafter: .*none is not a directory"):
        read_drafter_config(tmp_path / "none")


def test_switches_that_are_off_are_fine() -> None:
    off = {"dflash2_dynamic_conv": False, "dflash2_selector_rank": 256, "correction_rank": 8}
    assert drafter_config({**SPECULATORS, **off}) == drafter_config(SPECULATORS)


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_drafts_for_kimi_k3_only(config: dict[str, Any]) -> None:
    c = drafter_config(config)
    c.check_target(ModelConfig.from_dict(published_config("kimi_k3_mxfp4")))
    with pytest.raises(ConfigError, match="trained for another model: target_hidden_size is 7168"):
        c.check_target(ModelConfig.from_dict(published_config("kimi_linear_48b")))


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_rotations_are_those_of_the_reference(config: dict[str, Any]) -> None:
    c = drafter_config(config)
    theirs = reference_config(c)
    assert c.rope.inverse_frequencies == pytest.approx(inverse_frequencies(theirs).tolist())
    assert c.rope.scale == pytest.approx(rotation_scale(theirs))
    assert c.softmax_scale == pytest.approx(softmax_scale(theirs))


def test_width_is_bounded_by_the_trained_block() -> None:
    c: DrafterConfig = drafter_config(SPECFORGE)
    assert c.width(3) == 3 and c.width(7) == 7
    with pytest.raises(ConfigError, match=r"drafts per step: 8, .* 1\.\.7"):
        c.width(8)
