"""Measures a nano checkpoint: exact match on fresh problems, and perplexity on GSM8K.

python -m training.nano.evaluate --model checkpoints/nano --gsm8k test.jsonl
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tercel.gates.problems import CALCULATOR, Problem, extract_answer, generate
from tercel.reference.kimi_k3 import Config, Function, Model, recurrent_kda
from tercel.reference.weights import load_checkpoint_tensors
from tercel.runtime.chat.encoding import render
from tercel.runtime.chat.segments import encode
from tercel.runtime.tokenizer import Tokenizer
from training.nano.conversations import (
    Conversation,
    gsm8k_conversation,
    problem_turn,
    read_gsm8k,
    tool_turn,
)
from training.nano.data import encode_conversation
from training.nano.model import chunked_kda, training_model

SEED = 20_000_003
MAX_TOKENS = 320
"""Prompt and answer together; the longest worked answer needs about 290."""


def read_config(directory: Path) -> Config:
    return Config.from_dict(json.loads((directory / "config.json").read_text()))


def load(model: Model, directory: Path) -> Model:
    """Fills a model with the tensors of a checkpoint."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= load_file(directory / file)
    load_checkpoint_tensors(model, tensors)
    return model.eval()


@torch.inference_mode()
def greedy(
    model: Function, prompts: Sequence[list[int]], stop_id: int, device: torch.device
) -> list[list[int]]:
    """Greedy completions without a cache: the model is causal, so what follows a row is ignored."""
    rows = torch.zeros(len(prompts), MAX_TOKENS, dtype=torch.long, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    each = torch.arange(len(prompts), device=device)
    ends = starts.clone()
    is_open = torch.ones_like(starts, dtype=torch.bool)
    for step in range(MAX_TOKENS - int(starts.max())):
        token = model(rows)[each, ends - 1].argmax(-1)
        rows[each, ends] = torch.where(is_open, token, rows[each, ends])
        ends += is_open
        is_open &= token != stop_id
        if step % 8 == 7 and not is_open.any():
            break
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [row[start:end] for row, start, end in bounds]


@torch.inference_mode()
def teacher_forced(
    model: Function,
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    device: torch.device,
) -> tuple[float, float]:
    """Share of conversations whose every assistant token is the argmax, and their perplexity.

    A conversation counts exactly if greedy decoding would write it token for token.
    """
    exact, loss, count = 0, 0.0, 0
    encoded = [encode_conversation(tokenizer, conversation) for conversation in conversations]
    encoded.sort(key=lambda item: len(item[0]))
    for start in range(0, len(encoded), 8):
        batch = encoded[start : start + 8]
        length = max(len(ids) for ids, _ in batch)
        rows = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch], device=device)
        written = torch.tensor(
            [[w == 1 for w in weights] + [False] * (length - len(weights)) for _, weights in batch],
            device=device,
        )[:, 1:]
        logits, targets = model(rows)[:, :-1].float(), rows[:, 1:]
        exact += int(((logits.argmax(-1) == targets) | ~written).all(-1).sum())
        losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        loss += float(losses[written].sum())
        count += int(written.sum())
    return exact / len(encoded), math.exp(loss / count)


def exact_match(
    model: Function, problems: Sequence[Problem], tokenizer: Tokenizer, device: torch.device
) -> tuple[float, list[dict[str, Any]]]:
    """Share of problems whose greedy answer is right, and the wrong ones."""
    prompts = [
        encode(tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in problems
    ]
    completions = greedy(model, prompts, tokenizer.eos_id, device)
    wrong = []
    for problem, ids in zip(problems, completions, strict=True):
        text = tokenizer.decode(ids)
        _, found, response = text.partition("response<|sep|>")
        if not found or extract_answer(response.split("<|close|>")[0]) != problem.answer:
            wrong.append(
                {
                    "template": problem.template,
                    "question": problem.question,
                    "answer": problem.answer,
                    "text": text,
                }
            )
    return 1 - len(wrong) / len(problems), wrong


def evaluate(
    directory: Path, gsm8k: Path, device: torch.device, count: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every figure that the checkpoint's README states, and the problems it got wrong."""
    config, tokenizer = read_config(directory), Tokenizer.load(directory)
    on_gpu = device.type == "cuda"
    kda = chunked_kda if on_gpu else recurrent_kda
    fast = load(training_model(config, 0, kda), directory).to(device)
    exact = load(Model(config), directory).to(device)
    trained = list(islice(generate(SEED), count))
    held_out = list(islice(generate(SEED, held_out=True), count))
    tools = list(islice(generate(SEED, tool_share=1.0), count))
    figures: dict[str, Any] = {"problems": count}
    figures["exact_match"], wrong = exact_match(fast, trained, tokenizer, device)
    figures["held_out_exact_match"], wrong_held_out = exact_match(fast, held_out, tokenizer, device)
    figures["wrong_by_template"] = Counter(item["template"] for item in wrong)
    figures["held_out_wrong_by_template"] = Counter(item["template"] for item in wrong_held_out)
    default = {"thinking": True, "effort": "max"}
    sets = {
        "fp32_token_exact": [Conversation(problem_turn(p), default) for p in trained],
        "fp32_token_exact_low_effort": [
            Conversation(problem_turn(p, effort="low"), {"effort": "low"}) for p in trained
        ],
        "fp32_token_exact_no_thinking": [
            Conversation(problem_turn(p, thinking=False), {"thinking": False}) for p in trained
        ],
        "fp32_token_exact_tools": [
            Conversation(tool_turn(p), {"tools": [CALCULATOR]}) for p in tools
        ],
    }
    for name, conversations in sets.items():
        figures[name], _ = teacher_forced(exact, conversations, tokenizer, device)
    test = [gsm8k_conversation(example) for example in read_gsm8k(gsm8k)]
    test = test if on_gpu else test[:count]
    _, figures["gsm8k_test_perplexity"] = teacher_forced(exact, test, tokenizer, device)
    return figures, wrong + wrong_held_out[:20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    figures, wrong = evaluate(arguments.model, arguments.gsm8k, arguments.device, arguments.count)
    print(json.dumps({"figures": figures, "wrong": wrong}, indent=1))


if __name__ == "__main__":
    main()
