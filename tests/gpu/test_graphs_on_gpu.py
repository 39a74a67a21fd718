"""Decode steps of nano as CUDA graphs."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from tercel import LLM, SamplingParams
from tercel.core.sampling import RowSampling
from tercel.core.step import Row, StepPlan
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.targets.binding import SAMPLING

pytestmark = pytest.mark.gpu

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NANO, DRAFTER = CHECKPOINTS / "nano", str(CHECKPOINTS / "nano-dspark")
OPTIONS = {"device": "cuda", "max_running": 4, "max_model_len": 512}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, presence_penalty=0.1, logprobs=1),
]


def answers(**options):
    """(texts, calls, how steps ran)."""
    with LLM(NANO, **OPTIONS, **options) as llm:
        prompts = [
            encode(llm.tokenizer, render([{"role": "user", "content": each.question}]))
            for each in islice(generate(seed=29), 4)
        ]
        texts = [text.token_ids for params in PARAMS for text in llm.generate(prompts, params)]
        calls = dict(llm.engine.stats().program_calls)
    steps = {name: calls.pop(name) for name in tuple(calls) if name.startswith("step:")}
    return texts, calls, steps


@pytest.mark.parametrize("options", [{}, {"drafter": DRAFTER}, {"drafter": "suffix"}])
def test_texts_and_counts_are_those_of_steps_run_op_by_op(options):
    plain, plain_calls, _ = answers(decode_graphs=False, **options)
    texts, calls, steps = answers(**options)
    print(steps)
    assert texts == plain
    assert calls == plain_calls
    sampled = [name for name in calls if name.split(":")[0] in SAMPLING]
    assert not [name for name in sampled if name.endswith((":portable", ":reference"))]
    assert {name.split(":")[0] for name in sampled} >= {"sample", "penalize", "logprobs"}
    assert not [name for name in steps if name.startswith(("step:decode:e", "step:verify:e"))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", ["match", "block"])
def test_a_step_waits_for_nothing(rule, temperature):
    """Drafts and guesses included: the host is not asked until the results are read."""
    with LLM(NANO, drafter=DRAFTER, acceptance=rule, **OPTIONS) as llm:
        graphs = llm.engine._runner._graphs
        print(len(graphs), "graphs in", graphs.seconds, "s")
        sampling = RowSampling(temperature=temperature)
        row = Row("a", (5,) * 8, 0, 1, (1,), sampling=sampling, num_drafts=7)
        plan = StepPlan(verify=(row,), num_drafts=7)
        with torch.inference_mode():
            torch.cuda.set_sync_debug_mode("error")
            try:
                outcome = graphs.run(plan, graphs.size_of(plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert outcome.table[0, 9].item() == 1, "the row is finite"
        assert outcome.table.shape == (1, 8 + 2 + 7 + 7)
