"""Guesses on a GPU: nano's drafter is as healthy in bf16 as on a CPU, and the texts are nano's."""

import time
from itertools import islice
from pathlib import Path

import pytest

from tercel import LLM, SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render

pytestmark = pytest.mark.gpu

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
GREEDY = SamplingParams(temperature=0, max_tokens=300)


def answers(**options):
    """(token ids of 16 answers, seconds of 4 of them one by one, stats)."""
    with LLM(CHECKPOINTS / "nano", device="cuda", max_running=8, **options) as llm:
        prompts = [
            encode(llm.tokenizer, render([{"role": "user", "content": each.question}]))
            for each in islice(generate(seed=23), 16)
        ]
        together = llm.generate(prompts, GREEDY)
        start = time.monotonic()
        for prompt in prompts[:4]:
            llm.generate(prompt, GREEDY)
        seconds = time.monotonic() - start
        return [each.token_ids for each in together], seconds, llm.engine.stats()


@pytest.mark.parametrize("rule", ["match", "block"])
def test_drafted_texts_are_nanos(rule):
    plain, plain_s, _ = answers()
    drafted, drafted_s, stats = answers(drafter=str(CHECKPOINTS / "nano-dspark"), acceptance=rule)
    same = sum(ours == theirs for ours, theirs in zip(drafted, plain, strict=True))
    print(
        f"{rule}: {same} of 16 texts equal, acceptance length {stats.rounds.acceptance_length:.3f}"
        f", per position {[round(x, 3) for x in stats.rounds.per_position]}"
        f", 4 answers one by one {plain_s:.3f} s plain, {drafted_s:.3f} s drafted"
    )
    assert same >= 14, "bf16 may fork where two tokens are as likely"
    assert stats.rounds.acceptance_length >= 6.5
    assert any(key.startswith("drafter.markov_chain:") for key in stats.program_calls)
