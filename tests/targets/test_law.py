"""The law of what nano and its drafter write at temperature 1 is nano's own, by chi-square.

python -m tests.targets.test_law 100000     as many rounds, every rule
"""

import sys
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tercel.core.drafter import Embedding
from tercel.core.drafter_formats import read_drafter_config
from tercel.core.group import SingleGroup
from tercel.core.sampling import Stream
from tercel.gates.problems import generate
from tercel.ops._lib.distribution import draw
from tercel.ops._lib.philox import uniform
from tercel.ops.spec.accept import accept
from tercel.ops.spec.markov_chain import markov_chain
from tercel.reference.drafter import Drafter, Taps
from tercel.reference.kimi_k3 import Model
from tercel.runtime.chat import encode, render
from tercel.runtime.tokenizer import Tokenizer
from tests.targets.models import reference_in
from training.dspark.drafter import reference_config

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
CHUNK = 250


@cache
def models() -> tuple[Model, Drafter, list[int]]:
    target = reference_in(str(CHECKPOINTS / "nano"), torch.float32)
    config = read_drafter_config(CHECKPOINTS / "nano-dspark")
    drafter = Drafter(reference_config(config, Embedding.MASK_ROW))
    tensors = load_file(CHECKPOINTS / "nano-dspark/model.safetensors")
    state = {name: x.float() for name, x in tensors.items()}
    state["mask_row"] = state.pop("embed_tokens.weight")[config.mask_token_id]
    drafter.load_state_dict(state)
    return target, drafter, undecided()


def undecided() -> list[int]:
    """Part of the answer to a held-out problem: nano finds dozens of tokens likely to come next,
    its drafter several, and they agree on two thirds."""
    *_, problem = islice(generate(11, held_out=True), 9)
    messages = [
        {"role": "user", "content": problem.question},
        {
            "role": "assistant",
            "content": problem.response,
            "reasoning_content": problem.thinking,
        },
    ]
    segments = render(messages, add_generation_prompt=False, thinking=True, effort="max")
    return encode(Tokenizer.load(CHECKPOINTS / "nano"), segments)[:184]


@cache
def after(token: int) -> torch.Tensor:
    """[V] what the target says after the text and one more token."""
    target, _, text = models()
    return target(torch.tensor([[*text, token]]))[0, -1].float()


@torch.inference_mode()
def two_tokens(rounds: int, rule: str, reuse: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(how often each pair of tokens came first in a round of two guesses, its chance, accepted
    guesses per round); `reuse` draws the first guess from the number that decides on it."""
    target, drafter, text = models()
    taps, anchor = Taps(drafter.config), len(text) - 1
    first = target(torch.tensor([text]), capture=taps)[0, -1].float()
    seen = taps.features()[:, :anchor]
    where = torch.tensor([[anchor]])
    embed, head = target.model.embed_tokens.weight, target.lm_head.weight
    hidden = drafter(seen, torch.tensor([[text[-1]]]), where, 2, embed)[0, 0]
    base = torch.nn.functional.linear(hidden, head)
    law = first.double().softmax(-1)
    common = law * rounds >= 5
    size, accepted = len(first), 0
    # After a rarer token anything may come: it is not looked at.
    second = first.repeat(size, 1)
    for token in common.nonzero()[:, 0].tolist():
        second[token] = after(token)
    counts = torch.zeros(size * size)
    for start in range(0, rounds, CHUNK):
        seeds = torch.arange(start, start + CHUNK)
        positions, heat = torch.full_like(seeds, anchor), torch.ones(CHUNK)
        drafts, proposed = markov_chain(
            base.repeat(CHUNK, 1),
            torch.full_like(seeds, text[-1]),
            drafter.markov_head.markov_w1.weight,
            drafter.markov_head.markov_w2.weight,
            heat,
            seeds,
            positions,
            group=SingleGroup(),
            num_drafts=2,
        )
        if reuse:
            number = uniform(seeds, positions, int(Stream.ACCEPT))
            drafts[:, 0] = draw(proposed[::2].double().softmax(-1), number)
        rows = second[drafts[:, 0]]
        # What comes after the second guess is not looked at: any row serves.
        logits = torch.stack((first.expand(CHUNK, -1), rows, rows), 1).flatten(0, 1)
        kept, count, _ = accept(
            logits,
            drafts,
            proposed,
            torch.full_like(seeds, 2),
            heat,
            torch.zeros_like(seeds),
            heat,
            torch.zeros(CHUNK),
            seeds,
            positions,
            group=SingleGroup(),
            rule=rule,
            filtered=False,
        )
        one, two = kept[:, 0], kept[:, 1]
        # The next round gives the second token where this one ended with the first.
        ended = count == 0
        two[ended] = torch.multinomial(second[one[ended]].softmax(-1), 1)[:, 0]
        two[~common[one]] = 0
        counts += torch.bincount(one * size + two, minlength=len(counts))
        accepted += int(count.sum())
    chances = torch.zeros(size, size, dtype=torch.float64)
    chances[common] = law[common, None] * second[common].double().softmax(-1)
    chances[~common, 0] = law[~common]
    return counts, chances.flatten(), accepted / rounds


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> tuple[int, float, float]:
    """(bins, statistic, p-value); tokens that are expected fewer than five times share a bin."""
    wanted = chances * counts.sum()
    common = wanted >= 5
    ours = torch.cat((counts[common].double(), counts[~common].sum().double()[None]))
    theirs = torch.cat((wanted[common], wanted[~common].sum()[None]))
    statistic = ((ours - theirs) ** 2 / theirs).sum()
    freedom = torch.tensor((len(ours) - 1) / 2, dtype=torch.float64)
    return len(ours), float(statistic), float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "token", "block"])
def test_the_first_two_tokens_follow_the_targets_law(rule: str) -> None:
    torch.manual_seed(0)
    counts, chances, _ = two_tokens(10_000, rule, reuse=False)
    bins, _, chance = chi_square(counts, chances)
    assert bins >= 20 and chance > 1e-4


@pytest.mark.slow
def test_control_noise_that_is_used_twice_is_found() -> None:
    counts, chances, _ = two_tokens(10_000, "token", reuse=True)
    assert chi_square(counts, chances)[2] < 1e-6


def main() -> None:
    rounds = int(sys.argv[1])
    for rule, reuse in (("match", False), ("token", False), ("block", False), ("token", True)):
        counts, chances, accepted = two_tokens(rounds, rule, reuse)
        bins, statistic, chance = chi_square(counts, chances)
        noise = "reused" if reuse else "independent"
        print(
            f"{rule} {noise}: {rounds} rounds, {accepted:.3f} accepted, {bins} bins, "
            f"chi-square {statistic:.1f}, p {chance:.3g}"
        )


if __name__ == "__main__":
    main()
