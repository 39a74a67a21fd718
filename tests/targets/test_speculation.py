"""The loop of speculative decoding around the reference model: what comes out is what it should be,
whatever is drafted."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from tercel.core.group import SingleGroup
from tercel.core.sampling import Stream
from tercel.ops.sampling.sample import sample
from tercel.ops.spec.accept import accept
from tercel.reference.kimi_k3 import Config, Model
from tercel.reference.weights import init_weights

VECTOR = Path(__file__).parents[1] / "vectors/kimi_k3/config.json"
PROMPTS = ((3, 90, 17, 5), (100,))
LENGTH, DRAFTS, VOCABULARY = 10, 4, 128


@pytest.fixture(scope="module")
def target() -> Model:
    model = Model(Config.from_dict(json.loads(VECTOR.read_text())))
    init_weights(model, seed=1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model


@torch.no_grad()
def logits_after(target: Model, tokens: list[int]) -> torch.Tensor:
    """[T, V] one row per token."""
    return target(torch.tensor(tokens)[None])[0].float()


def parameters(count: int, temperature: float, seed: int) -> dict[str, torch.Tensor]:
    full = torch.full((count,), 0)
    return {
        "temperature": torch.full((count,), temperature),
        "top_k": full + 20,
        "top_p": torch.full((count,), 0.9),
        "min_p": torch.zeros(count),
        "seeds": full + seed,
    }


@cache
def plain(target: Model, prompt: tuple[int, ...], temperature: float, seed: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LENGTH:
        row = logits_after(target, tokens)[-1:]
        drawn, _ = sample(
            row,
            **parameters(1, temperature, seed),
            positions=torch.tensor([len(tokens)]),
            stream=int(Stream.TARGET),
            filtered=True,
        )
        tokens.append(int(drawn))
    return tokens


def speculative(
    target: Model,
    prompt: tuple[int, ...],
    temperature: float,
    seed: int,
    answer: list[int],
    rule: str,
) -> tuple[list[int], int]:
    """Drafts are the plain answer with every third token wrong, fewer of them in some rounds; ends
    with whole rounds. Also the number of rounds."""
    tokens, rounds = list(prompt), 0
    first = logits_after(target, tokens)[-1:]
    start, _ = sample(
        first,
        **parameters(1, temperature, seed),
        positions=torch.tensor([len(tokens)]),
        stream=int(Stream.TARGET),
        filtered=True,
    )
    tokens.append(int(start))
    while len(tokens) < len(prompt) + LENGTH:
        anchor = len(tokens) - 1
        ahead = (answer + [0] * DRAFTS)[len(tokens) : len(tokens) + DRAFTS]
        drafts = [(t + (anchor + i) // 3 % 2) % VOCABULARY for i, t in enumerate(ahead)]
        count = DRAFTS - rounds % 3
        rows = logits_after(target, tokens + drafts)[anchor:]
        kept, accepted, finite = accept(
            rows,
            torch.tensor([drafts]),
            None,
            torch.tensor([count]),
            **parameters(1, temperature, seed),
            positions=torch.tensor([anchor]),
            group=SingleGroup(),
            rule=rule,
            filtered=True,
        )
        assert bool(finite) and int(accepted) <= count
        tokens += kept[0, : int(accepted) + 1].tolist()
        assert tokens[-1] == int(kept[0, -1])
        rounds += 1
    return tokens, rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_match_gives_the_text_of_plain_decoding(target: Model, temperature: float) -> None:
    total = 0
    for seed, prompt in enumerate(PROMPTS):
        expected = plain(target, prompt, temperature, seed)
        tokens, rounds = speculative(target, prompt, temperature, seed, expected, "match")
        assert tokens[: len(expected)] == expected
        total += rounds
    assert total < len(PROMPTS) * LENGTH * 0.7, "drafts were accepted"


@pytest.mark.parametrize("rule", ["token", "block"])
def test_other_rules_are_greedy_at_temperature_zero(target: Model, rule: str) -> None:
    for seed, prompt in enumerate(PROMPTS):
        expected = plain(target, prompt, 0.0, seed)
        tokens, _ = speculative(target, prompt, 0.0, seed, expected, rule)
        assert tokens[: len(expected)] == expected
