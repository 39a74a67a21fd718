"""The engine on a tiny random checkpoint: everything real but the weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tercel.config import EngineConfig, SamplingParams
from tercel.core.model import read_config_json
from tercel.errors import CheckpointError, ConfigError
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import byte_tokens, write_rank_file
from tercel.weights.tiny import FAMILIES, tiny_config
from tercel.weights.write import write_random_checkpoint

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "linear_attn_config.num_heads": 2,
}
OPTIONS = {"cache_tokens": 128, "page_size": 8, "max_running": 4, "seed": 1, "num_threads": 1}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [f"{number} times " * (2 * number + 1) for number in range(6)]


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tokens = byte_tokens()
    config = tiny_config(request.param, len(tokens) + 256, changes=SMALL)
    write_random_checkpoint(path, config)
    write_rank_file(path / "tiktoken.model", tokens)
    return path


@pytest.fixture(scope="module")
def alone(model_dir):
    """What each prompt gives by itself, in one prefill."""
    with LLM(model_dir, **OPTIONS, max_step_tokens=256) as llm:
        return [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("max_step_tokens", [7, 33, 256])
def test_a_batch_never_changes_a_greedy_text(model_dir, alone, max_step_tokens):
    with LLM(model_dir, **OPTIONS, max_step_tokens=max_step_tokens) as llm:
        batch = llm.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in batch] == alone
        usage = llm.engine.stats().usage
        assert usage.num_preemptions > 0 or max_step_tokens < 256
        assert (usage.num_used_pages, usage.num_used_slots) == (0, 0)


def test_a_seed_repeats_in_any_batch(model_dir):
    params = SamplingParams(max_tokens=12, seed=7, top_p=0.9, repetition_penalty=1.1)
    with LLM(model_dir, **OPTIONS) as llm:
        one = llm.generate(PROMPTS[1], params).token_ids
        assert llm.generate(PROMPTS, params)[1].token_ids == one
        assert llm.generate(PROMPTS[1], replace(params, seed=8)).token_ids != one


def test_nan_weights_end_their_request_and_nothing_else(model_dir):
    with LLM(model_dir, **OPTIONS) as llm:
        expected = llm.generate("healthy", GREEDY)
        unused = next(token for token in range(256) if token not in expected.token_ids)
        embed = llm.engine._runner._work._program.weights.embed
        row = embed[unused].clone()
        embed[unused] = torch.nan
        prompts = [[unused] * 40, llm.tokenizer.encode("healthy"), [1] * 20 + [unused]]
        first, healthy, last = llm.generate(prompts, GREEDY)
        assert (first.finish_reason, last.finish_reason) == ("error", "error")
        assert healthy == expected
        embed[unused] = row
        assert llm.generate(["healthy"] * 6, GREEDY) == [expected] * 6


def test_random_weights_need_no_tensors(model_dir, tmp_path):
    for name in ("config.json", "tiktoken.model"):
        shutil.copy(model_dir / name, tmp_path)
    with LLM(tmp_path, **OPTIONS, load_format="dummy") as llm:
        assert llm.generate("hello", GREEDY).completion_tokens == 12
    (tmp_path / "tiktoken.model").unlink()
    with LLM(tmp_path, **OPTIONS, load_format="dummy") as llm:
        assert llm.tokenizer.num_base_tokens < 512
        assert llm.generate("hello", GREEDY).completion_tokens == 12
    with pytest.raises(CheckpointError, match="rank file cannot be read"):
        LLM(tmp_path, **OPTIONS)
    shutil.copy(model_dir / "tiktoken.model", tmp_path)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq' is not supported"),
        (
            {"quant_method": "compressed-tensors", "format": "int4"},
            "format='int4' is not supported",
        ),
    ],
)
def test_refuses_an_unknown_quantization(model_dir, tmp_path, declared, message):
    config = read_config_json(model_dir) | {"quantization_config": declared}
    config.get("text_config", {}).pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(model_dir / "tiktoken.model", tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(EngineConfig(model=str(tmp_path)))


def test_refused_before_the_weights(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        open_checkpoint(EngineConfig(model="nowhere"))
    with pytest.raises(ConfigError, match="does not divide by tp 3"):
        open_checkpoint(EngineConfig(model=str(model_dir), layout="tp3"))
    write_rank_file(tmp_path / "tiktoken.model", [*byte_tokens(), b"one more"])
    shutil.copy(model_dir / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        open_checkpoint(EngineConfig(model=str(tmp_path)))
