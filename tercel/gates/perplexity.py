"""Perplexity of worked GSM8K answers, in the chat format, computed by the reference model."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tercel.core.model import read_config_json
from tercel.errors import CheckpointError, ConfigError
from tercel.reference.kimi_k3 import Config, Model
from tercel.reference.weights import load_checkpoint_tensors
from tercel.runtime.chat import encode, render
from tercel.runtime.tokenizer import Tokenizer

Example = tuple[list[int], list[int]]
"""Prompt ids, and the ids of the answer behind it."""

BATCH = 32


def gsm8k_perplexity(model_dir: Path, file: Path, report: Callable[[int, int], None]) -> float:
    """exp of the mean loss over the tokens of all answers, in fp32.

    Args:
        file: JSON lines with `question` and `answer`, as the data set is published.
        report: called with examples done and in all.

    Raises:
        ConfigError: the file cannot be read.
        CheckpointError: the model cannot be read.
    """
    examples = sorted(_examples(file, Tokenizer.load(model_dir)), key=lambda e: len(e[0] + e[1]))
    model = _load(model_dir)
    loss, count = 0.0, 0
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        loss += _loss(model, batch)
        count += sum(len(answer) for _, answer in batch)
        report(start + len(batch), len(examples))
    return math.exp(loss / count)


def _examples(file: Path, tokenizer: Tokenizer) -> Iterator[Example]:
    try:
        lines = file.read_text("utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
        pairs = [(entry["question"], *entry["answer"].split("\n#### ")) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"gsm8k: {file} is not GSM8K's JSON lines ({error})") from error
    for question, steps, answer in pairs:
        # The calculator marks are not part of the text.
        reasoning = re.sub(r"<<.*?>>", "", steps)
        user = {"role": "user", "content": question}
        reply = {
            "role": "assistant",
            "reasoning_content": reasoning,
            "content": f"The answer is {answer}.",
        }
        prompt = encode(tokenizer, render([user]))
        whole = encode(tokenizer, render([user, reply], add_generation_prompt=False))
        yield prompt, whole[len(prompt) :]


def _load(model_dir: Path) -> Model:
    try:
        model = Model(Config.from_dict(read_config_json(model_dir)))
        tensors: dict[str, Tensor] = {}
        for shard in sorted(model_dir.glob("*.safetensors")):
            tensors |= load_file(shard)
        load_checkpoint_tensors(model, tensors)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model_dir}: {error}") from error
    return model.eval()


@torch.inference_mode()
def _loss(model: Model, batch: list[Example]) -> float:
    """Sum over the answers' tokens. The model is causal, so padding behind a row is harmless."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    targets = torch.full((len(batch), length), -100)
    for row, (prompt, answer) in enumerate(batch):
        ids = torch.tensor(prompt + answer)
        tokens[row, : len(ids)] = ids
        targets[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    logits = model(tokens).float()
    return float(cross_entropy(logits.mT, targets, reduction="sum"))
