"""The trained checkpoint in the repository: published K3 format, and it solves fresh problems."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tercel.gates.problems import Problem, generate
from tercel.reference.kimi_k3 import Config, Model
from tercel.reference.weights import load_checkpoint_tensors
from tercel.runtime.chat.encoding import render
from tercel.runtime.chat.segments import encode
from tercel.runtime.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "checkpoints" / "nano"
FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((NANO / "config.json").read_text())


@pytest.fixture(scope="module")
def shards() -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(NANO.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def tensors(shards: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for shard in shards.values() for name, tensor in shard.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@pytest.fixture(scope="module")
def model(config: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    model = Model(Config.from_dict(config))
    load_checkpoint_tensors(model, tensors)
    return model


def test_files_are_small_enough_for_the_repository() -> None:
    sizes = [path.stat().st_size for path in NANO.iterdir()]
    assert sum(sizes) <= 24_000_000
    assert max(sizes) <= 16 * 1024**2


def test_index_names_every_tensor_once(shards: dict[str, dict[str, Tensor]]) -> None:
    index = json.loads((NANO / "model.safetensors.index.json").read_text())
    stored = {name: file for file, shard in shards.items() for name in shard}
    assert index["weight_map"] == stored
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    assert index["metadata"]["total_size"] == total


def test_config_has_the_real_head_dims_and_both_layer_patterns(config: dict[str, Any]) -> None:
    text = config["text_config"]
    linear = text["linear_attn_config"]
    assert (linear["head_dim"], linear["num_heads"]) == (128, 4)
    assert (text["qk_nope_head_dim"], text["qk_rope_head_dim"]) == (128, 64)
    assert (text["v_head_dim"], text["kv_lora_rank"]) == (128, 512)
    assert text["num_experts"] >= 16 and text["num_experts_per_token"] == 4
    layers = text["num_hidden_layers"]
    assert {layers - 1, layers} < set(linear["full_attn_layers"])
    assert layers // text["attn_res_block_size"] >= 2


def test_parameter_count(model: Model) -> None:
    assert 12e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 16e6


def test_dtypes_are_those_of_the_published_checkpoint(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("weight_packed", "weight_scale")):
            expected = torch.uint8
        else:
            expected = torch.float32 if name.endswith(FP32) else torch.bfloat16
        assert tensor.dtype == expected, name
        assert name.startswith("language_model.")
        assert tensor.dtype == torch.uint8 or tensor.isfinite().all(), name


def test_experts_are_mxfp4_with_sane_scales(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> None:
    text = config["text_config"]
    latent, width = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    shapes = {"w1": (width, latent), "w3": (width, latent), "w2": (latent, width)}
    packed = [name for name in tensors if name.endswith("weight_packed")]
    assert len(packed) == (text["num_hidden_layers"] - 1) * text["num_experts"] * 3
    for name in packed:
        rows, inputs = shapes[name.split(".")[-2]]
        scale = tensors[name.replace("weight_packed", "weight_scale")]
        assert tensors[name].shape == (rows, inputs // 2)
        assert scale.shape == (rows, inputs // 32)
        # 2**(scale - 127): trained weights are neither vanishing nor larger than 16.
        is_used = (tensors[name] & 0x77).unflatten(-1, (-1, 16)).ne(0).any(-1)
        assert scale[is_used].min() > 100
        assert scale.max() < 131
        # The largest element of a block uses the upper half of the e2m1 range.
        magnitude = torch.stack([tensors[name] & 7, tensors[name] >> 4 & 7])
        assert (magnitude.amax(0).unflatten(-1, (-1, 16)).amax(-1) >= 5).float().mean() > 0.99


def test_a_log_is_padded_with_zeros(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    names = [name for name in tensors if name.endswith("A_log")]
    assert names
    for name in names:
        assert tensors[name].shape == (128,)
        assert not tensors[name][heads:].any() and tensors[name][:heads].all()


def test_tokenizer_keeps_digits_apart_and_matches_the_config(
    tokenizer: Tokenizer, config: dict[str, Any]
) -> None:
    for token in range(tokenizer.num_base_tokens):
        assert len(re.findall(rb"\d", tokenizer.decode_bytes([token]))) < 2
    assert tokenizer.vocab_size == config["text_config"]["vocab_size"]
    assert tokenizer.bos_id == config["bos_token_id"]
    assert tokenizer.eos_id == config["eos_token_id"]
    assert tokenizer.pad_id == config["pad_token_id"]
    described = json.loads((NANO / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert all(tokenizer.decode([int(slot)]) == t["content"] for slot, t in described.items())


def test_greedy_decoding_writes_the_worked_answer(model: Model, tokenizer: Tokenizer) -> None:
    """Every token that the model should write is its argmax, so greedy decoding writes them."""
    problems = list(islice(generate(2_026), 5))
    pairs = [_prompt_and_answer(tokenizer, problem) for problem in problems]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    rows = torch.tensor([[*p, *a, *[0] * (longest - len(p) - len(a))] for p, a in pairs])
    with torch.inference_mode():
        greedy = model(rows).argmax(-1)
    for row, (prompt, answer) in zip(greedy, pairs, strict=True):
        end = len(prompt) + len(answer)
        assert tokenizer.decode(row[len(prompt) - 1 : end - 1].tolist()) == tokenizer.decode(answer)


def _prompt_and_answer(tokenizer: Tokenizer, problem: Problem) -> tuple[list[int], list[int]]:
    question = {"role": "user", "content": problem.question}
    reply = {
        "role": "assistant",
        "reasoning_content": problem.thinking,
        "content": problem.response,
    }
    prompt = encode(tokenizer, render([question]))
    whole = encode(tokenizer, render([question, reply], add_generation_prompt=False))
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) :]
