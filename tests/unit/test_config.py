"""One configuration object from the first day: what is not built is refused by name."""

import json

import pytest

from tercel.config import EngineConfig, SamplingParams
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig, read_config_json
from tercel.errors import ConfigError, RequestError


def k3_text(**changes):
    """A small K3 text configuration under the published keys."""
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": [3, 4],
            "kda_layers": [1, 2],
        },
    }
    return {**text, **changes}


def test_k3_from_its_keys():
    config = ModelConfig.from_dict({"text_config": k3_text(), "eos_token_id": 7})
    assert config.mla_layers == (2, 3)
    assert config.num_snapshots == 2
    assert config.latent_size == 32
    assert config.latent_norm_eps == 1e-6
    assert config.eos_token_id == 7
    assert [config.takes_snapshot(i) for i in range(4)] == [True, False, True, False]


def test_kimi_linear_spellings():
    text = k3_text(num_experts_per_tok=2, n_shared_experts=1, attn_res_block_size=None)
    del text["num_experts_per_token"], text["num_shared_experts"]
    config = ModelConfig.from_dict(text)
    assert (config.num_experts_per_token, config.num_shared_experts) == (2, 1)
    assert config.num_snapshots == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise_gate": 3}, "surprise_gate=3 is unknown and could change the forward"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"hidden_size": -1}, "hidden_size=-1 must be a positive integer"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
        ({"linear_attn_config": []}, "linear_attn_config=\\[\\] must be an object"),
        ({"n_group": 4}, "n_group=4"),
        ({"q_lora_rank": "x"}, "q_lora_rank='x' must be a positive integer"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers=1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be a layer number"),
        ({"attn_res_block_size": 0}, "attn_res_block_size=0 must be a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ({"moe_renormalize": "no"}, "moe_renormalize='no' must be true or false"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None must be"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' must be an object"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"num_experts_per_tok": 3}, "num_experts_per_token is given twice, as 2 and as 3"),
    ],
)
def test_refuses_keys(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(k3_text(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate_lower_bound": 5},
            "linear_attn_config.gate_lower_bound=5 must be a negative",
        ),
        ({"num_heads": "4"}, "linear_attn_config.num_heads='4' must be a positive integer"),
        ({"full_attn_layers": 3}, "linear_attn_config.full_attn_layers=3 must be a list"),
        ({"kda_layers": [None]}, r"linear_attn_config.kda_layers=\[None\] must be a list"),
        ({"window": 8}, "linear_attn_config.window=8 is unknown and could change the forward"),
    ],
)
def test_refuses_keys_of_linear_attention(changes, message):
    linear = {**k3_text()["linear_attn_config"], **changes}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(k3_text(linear_attn_config=linear))


def test_refuses_keys_beside_the_text_model():
    for key, value in {"tie_word_embeddings": True, "sliding_window": 8}.items():
        with pytest.raises(ConfigError, match=f"{key}={value}"):
            ModelConfig.from_dict({"text_config": k3_text(), key: value})


def test_whole_numbers_are_numbers():
    linear = {**k3_text()["linear_attn_config"], "gate_lower_bound": -5}
    config = ModelConfig.from_dict(k3_text(activation_situ_beta=4, linear_attn_config=linear))
    assert (config.situ_beta, config.kda_gate_lower_bound) == (4.0, -5.0)
    assert isinstance(config.kda_gate_lower_bound, float)


def test_refuses_layers_that_are_listed_twice_or_never():
    linear = {**k3_text()["linear_attn_config"], "kda_layers": [1]}
    with pytest.raises(ConfigError, match="each of the 4 layers exactly once"):
        ModelConfig.from_dict(k3_text(linear_attn_config=linear))


def test_every_missing_key_is_named_at_once():
    text = k3_text()
    del text["kv_lora_rank"], text["num_experts"]
    with pytest.raises(ConfigError, match=r"kv_lora_rank is missing; num_experts is missing"):
        ModelConfig.from_dict(text)


def test_config_files(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        read_config_json(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(k3_text()))
    assert read_config_json(tmp_path)["hidden_size"] == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_dtype", "nvfp4"),
        ("disaggregation", "context"),
        ("profile", "helix8.toml"),
        ("prefix_caching", True),
    ],
)
def test_what_is_not_built_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not built"):
        EngineConfig.from_dict({"model": "x", name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "Auto "}, "mode='Auto '; choose one of off, auto, require"),
        ({"dtype": "fp8"}, "dtype='fp8'; choose one of"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"cache_tokens": 100}, "cache_tokens=100 must be a multiple of page_size=64"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"modell": "x"}, "modell: unknown; the fields are model, mode"),
    ],
)
def test_engine_configuration_is_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict(changes)


@pytest.mark.parametrize(
    "name",
    [
        "tp1",
        "tp4",
        "tp16_moetp4ep4",
        "tp16_moetp16ep1",
        "tp8_pp2",
        "helix8",
        "helix16_moetp4ep4",
        "dep16",
        "tp1_dwdp16",
    ],
)
def test_layout_names_round_trip(name):
    assert Layout.parse(name).name == name


def test_an_unset_split_is_not_the_one_it_resolves_to():
    unset, explicit = Layout.parse("tp16"), Layout.parse("tp16_moetp16ep1")
    assert unset.expert_split == explicit.expert_split == (16, 1)
    assert (unset.split_set, explicit.split_set) == (False, True)


@pytest.mark.parametrize("name", ["", "tp", "tp0x", "ep4", "tp4_moetp2", "helix", "tp2_pp"])
def test_unknown_layout_names(name):
    with pytest.raises(ConfigError, match="is not a layout name"):
        Layout.parse(name)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "num_attention_heads 4 does not divide by tp 3"),
        (Layout(tp=4, moe_tp=2, moe_ep=4), "moe_tp 2 x moe_ep 4 must be tp 4"),
        (Layout(pp=9), "pp 9 exceeds num_hidden_layers 4"),
        (Layout(tp=0), "tp must be at least 1"),
        (Layout(attention_dp=2), r"attention_dp=2\) is not built; choose tpN"),
        (Layout(decode_cp=2), r"helixN \(decode_cp=2\) is not built"),
        (Layout(distributed_weights=4), r"distributed_weights=4\) is not built"),
    ],
)
def test_layouts_that_do_not_divide(layout, message):
    with pytest.raises(ConfigError, match=message):
        layout.check(ModelConfig.from_dict(k3_text()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("min_tokens", 5000),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("logprobs", 21),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", "END"),
        ("stop", ("x",) * 65),
        ("logit_bias", {3: 200.0}),
        ("temprature", 1.0),
        ("max_tokens", "3"),
        ("max_tokens", 3.0),
        ("min_tokens", None),
        ("temperature", "hot"),
        ("top_k", True),
        ("stop", (1,)),
        ("stop", 3),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: "1"}),
        ("logit_bias", [3]),
        ("ignore_eos", 1),
        ("seed", 1.5),
        ("logprobs", True),
    ],
)
def test_sampling_parameters_name_the_field(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({name: value})
    assert caught.value.field == name
