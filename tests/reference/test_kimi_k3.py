"""What the reference promises about itself; its numbers are in test_kimi_k3_oracles.py."""

import ast
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tercel.reference import kimi_k3
from tercel.reference.kimi_k3 import Config, Model, naive_experts, recurrent_kda
from tercel.reference.weights import (
    FP32_PARAMETERS,
    cast,
    dequantize_mxfp4,
    init_weights,
    load_checkpoint_tensors,
)

TESTS = Path(__file__).parents[1]
CONFIGS = {
    name: json.loads((TESTS / "vectors" / name / "config.json").read_text())
    for name in ("kimi_k3", "kimi_linear")
}

PUBLISHED = {name: json.loads((TESTS / "configs" / f"{name}.json").read_text()) for name in CONFIGS}


def tiny(
    name: str, dtype: torch.dtype = torch.float64, **functions: Callable[..., Tensor]
) -> Model:
    model = Model(Config.from_dict(CONFIGS[name]), **functions)
    init_weights(model, seed=1)
    for parameter in model.parameters():
        # Wider than a trained initialisation, so that all parts matter.
        if parameter.dim() > 1:
            parameter.data *= 5
    return cast(model, dtype)


def tokens(length: int) -> Tensor:
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(2))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def test_the_whole_model_is_one_short_file_over_torch() -> None:
    source = Path(kimi_k3.__file__).read_text()
    assert source.count("\n") < 500
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).split(".")[0])
    assert roots - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_logits(name: str) -> None:
    model, a = tiny(name), tokens(12)
    b = a.clone()
    b[:, 7] = (b[:, 7] + 1) % 128
    before, after = model(a), model(b)
    assert close(before[:, :7], after[:, :7], 1e-12)
    assert ((before - after).abs().amax(-1)[:, 7:] > 1e-3).all()


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_prefix_has_the_logits_it_has_alone(name: str) -> None:
    model, a = tiny(name), tokens(12)
    for length in (1, 2, 5):
        assert close(model(a[:, :length]), model(a)[:, :length], 1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_fp32_agrees_with_fp64(name: str) -> None:
    accurate, single = tiny(name)(tokens(12)), tiny(name, torch.float32)(tokens(12))
    assert (accurate.dtype, single.dtype) == (torch.float64, torch.float32)
    assert close(single, accurate, 1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_keeps_the_fp32_tensors_and_trains(name: str) -> None:
    model = tiny(name, torch.bfloat16)
    for key, parameter in model.named_parameters():
        single = key.endswith(FP32_PARAMETERS)
        assert parameter.dtype == (torch.float32 if single else torch.bfloat16), key
    logits = model(tokens(12))
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_every_parameter_but_the_selection_bias(name: str) -> None:
    model, a = tiny(name), tokens(12)
    logits = model(a[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), a[:, 1:].flatten()).backward()
    unreached = {k for k, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    bias = {k for k, _ in model.named_parameters() if k.endswith("e_score_correction_bias")}
    # Before the first snapshot there is nothing to mix, so the published parameters go unused.
    first = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert unreached == bias | (first if name == "kimi_k3" else set())


@torch.no_grad()
def test_capture_gives_the_streams_after_each_layer() -> None:
    taps: list[tuple[int, Tensor, Tensor]] = []
    model = tiny("kimi_k3")
    logits = model(tokens(6), capture=lambda *tap: taps.append(tap))
    assert [layer for layer, _, _ in taps] == list(range(9))
    assert torch.equal(model.lm_head(model.model.norm(taps[-1][2])), logits)
    # Layer 2 ends a block: its prefix becomes a snapshot, but the next attention reads it once.
    layers, embeddings = model.model.layers, model.model.embed_tokens(tokens(6))
    _, prefix, mixture = taps[2]
    site = (layers[3], "self_attention_res", [embeddings], prefix)
    assert torch.equal(kimi_k3.attention_residual(*site), mixture)
    snapshots = [embeddings, prefix]
    assert torch.equal(layers[3](mixture, prefix, snapshots), taps[3][1])


@torch.no_grad()
def test_without_scores_the_mixture_is_the_mean() -> None:
    layer = tiny("kimi_k3").model.layers[1]
    layer.mlp_res_proj.weight.zero_()
    sources = torch.randn(4, 1, 3, 96, dtype=torch.float64)
    mixture = kimi_k3.attention_residual(layer, "mlp_res", [*sources[:3]], sources[3])
    assert close(mixture, sources.mean(0), 1e-12)


@torch.no_grad()
def test_kda_and_experts_can_be_replaced() -> None:
    seen: dict[str, Any] = {}

    def kda(*args: Tensor) -> Tensor:
        seen["kda"] = args
        return recurrent_kda(*args)

    def experts(*args: Any) -> Tensor:
        seen["experts"] = args
        return naive_experts(*args)

    replaced = tiny("kimi_k3", torch.bfloat16, kda=kda, experts=experts)
    assert torch.equal(replaced(tokens(5)), tiny("kimi_k3", torch.bfloat16)(tokens(5)))
    q, k, v, g, beta = seen["kda"]
    assert q.shape == k.shape == v.shape == g.shape == (2, 5, 4, 16)
    assert beta.shape == (2, 5, 4)
    assert v.dtype == torch.bfloat16
    assert {x.dtype for x in (q, k, g, beta)} == {torch.float32}
    assert ((g <= 0) & (g >= -5)).all() and ((beta > 0) & (beta < 1)).all()
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(2, 5, 4), rtol=1e-3, atol=0)
    torch.testing.assert_close(q.norm(dim=-1), torch.full((2, 5, 4), 0.25), rtol=1e-3, atol=0)
    z, ids, weights, w1, w3, w2, act = seen["experts"]
    assert (z.shape, ids.shape, weights.shape) == ((10, 64), (10, 3), (10, 3))
    assert (z.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    assert (w1.shape, w3.shape, w2.shape) == ((8, 32, 64), (8, 32, 64), (8, 64, 32))
    assert act(z, z).dtype == torch.bfloat16


def test_the_delta_rule_overwrites_what_a_key_held() -> None:
    # With beta = 1, no decay and one unit key, the state holds only the last value.
    key = torch.zeros(1, 3, 1, 4, dtype=torch.float64)
    key[..., 1] = 1
    v = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    beta = torch.ones(1, 3, 1, dtype=torch.float64)
    assert close(recurrent_kda(key, key, v, torch.zeros_like(key), beta), v, 1e-12)
    # The decay acts on the state before the token is written, per key channel.
    g = torch.full_like(key, -1.0)
    beta[:, 1:] = 0
    decayed = recurrent_kda(key, key, v, g, beta)
    assert close(decayed[:, 2], v[:, 0] * torch.tensor(-2.0).exp(), 1e-7)


def test_published_k3_has_the_published_number_of_tensors_and_bytes() -> None:
    config = Config.from_dict(PUBLISHED["kimi_k3"])
    with torch.device("meta"):
        model = Model(config)
    count, size = 0, 0
    for name, parameter in model.named_parameters():
        numel = parameter.numel()
        if ".experts." in name:
            count, size = count + 2 * len(parameter), size + numel // 2 + numel // 32
        elif name.endswith("A_log"):
            count, size = count + 1, size + 128 * 4
        else:
            width = 4 if name.endswith(FP32_PARAMETERS) else 2
            count, size = count + 1, size + width * numel
    projector = [4096 * 4096, 7168 * 4096, 7168]
    vit = [1024 * 3 * 14 * 14, 64 * 64 * 1024, 1024]
    vit += 27 * [1024, 1024, 4608 * 1024, 1024 * 1536, 4096 * 1024, 1024 * 4096]
    assert count + len(projector + vit) == 497_220
    assert size + 2 * sum(projector + vit) == 1_560_860_324_864


def test_published_kimi_linear_has_48_billion_parameters() -> None:
    with torch.device("meta"):
        model = Model(Config.from_dict(PUBLISHED["kimi_linear"]))
    names = {name for name, _ in model.named_parameters()}
    assert not any("_res_" in name or "routed_expert" in name for name in names)
    assert "model.layers.0.self_attn.g_a_proj.weight" in names
    assert 48e9 < sum(parameter.numel() for parameter in model.parameters()) < 50e9


def test_layers_of_the_config_count_from_zero() -> None:
    config = Config.from_dict(PUBLISHED["kimi_k3"])
    mla = set(range(93)) - set(config.kda_layers)
    assert mla == {*range(3, 92, 4), 92}
    assert Config.from_dict(PUBLISHED["kimi_k3"]["text_config"]) == config


def test_class_names_decide_nothing() -> None:
    renamed = copy.deepcopy(CONFIGS["kimi_linear"])
    renamed |= {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"]}
    assert Config.from_dict(renamed) == Config.from_dict(CONFIGS["kimi_linear"])


@pytest.mark.parametrize(
    "path, value",
    [
        ("rope_interleave", True),
        ("linear_attn_config.allow_neg_eigval", True),
        ("mla_use_nope", False),
        ("rope_scaling", {"type": "yarn"}),
        ("hidden_act", "gelu"),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("num_expert_group", 2),
        ("moe_layer_freq", 2),
        ("num_key_value_heads", 2),
        ("num_nextn_predict_layers", 1),
        ("tie_word_embeddings", True),
        ("linear_attn_config.kda_layers", [1, 2, 3, 4, 5, 6, 7]),
        ("mla_use_nope", None),
        ("kv_lora_rank", None),
        ("linear_attn_config.full_attn_layers", None),
    ],
)
def test_a_config_it_cannot_compute_is_refused(path: str, value: object) -> None:
    config = copy.deepcopy(CONFIGS["kimi_k3"])
    level, _, key = path.rpartition(".")
    keys = config["text_config"][level] if level else config["text_config"]
    keys[key] = value
    if value is None:
        del keys[key]
    with pytest.raises(ValueError, match=key):
        Config.from_dict(config)


def exported(model: Model) -> dict[str, Tensor]:
    """The model as a checkpoint with plain experts."""
    tensors = {}
    for name, value in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("w1", "w2", "w3"):
            tensors |= {f"{parent}.{e}.{leaf}.weight": value[e] for e in range(len(value))}
        else:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_plain_checkpoints_load_under_both_names(prefix: str) -> None:
    source, target = tiny("kimi_k3"), Model(Config.from_dict(CONFIGS["kimi_k3"]))
    tensors = {prefix + name: tensor for name, tensor in exported(source).items()}
    tensors |= {"vision_tower.x": torch.zeros(1), "mm_projector.proj.0.weight": torch.zeros(1)}
    load_checkpoint_tensors(target, tensors)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name).to(parameter.dtype)), name


def test_wrong_checkpoints_are_refused() -> None:
    model = tiny("kimi_k3", torch.float32)
    good = exported(model)
    a_log, norm = "model.layers.0.self_attn.A_log", "model.norm.weight"
    padded = torch.cat([good[a_log], torch.zeros(12)])
    load_checkpoint_tensors(model, good | {a_log: padded})
    padded[-1] = 0.5
    with pytest.raises(ValueError, match=r"A_log.*must be zero"):
        load_checkpoint_tensors(model, good | {a_log: padded})
    with pytest.raises(ValueError, match=r"unknown tensors.*extra"):
        load_checkpoint_tensors(model, good | {"model.extra": padded})
    with pytest.raises(ValueError, match=r"norm.weight is \[95\]; expected \[96\]"):
        load_checkpoint_tensors(model, good | {norm: good[norm][1:]})
    del good["model.layers.3.block_sparse_moe.experts.7.w2.weight"]
    with pytest.raises(ValueError, match=r"lacks .*experts.7.w2.weight"):
        load_checkpoint_tensors(model, good)


def test_mxfp4_values() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.tensor(half + [-x for x in half])
    for exponent in (-126, -7, 0, 5):
        scale = torch.tensor([[127 + exponent]], dtype=torch.uint8)
        expected = codes.repeat(2)[None] * 2.0**exponent
        assert torch.equal(dequantize_mxfp4(packed, scale), expected)
