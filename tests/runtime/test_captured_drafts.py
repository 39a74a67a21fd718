"""Steps that draft, captured: texts, guesses and calls are those of steps run op by op."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tercel import LLM, SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.checkpoint import open_checkpoint
from tests.tape import TapeCapture

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NANO, DRAFTER = CHECKPOINTS / "nano", CHECKPOINTS / "nano-dspark"
SMALL = {"page_size": 16, "cache_tokens": 1024, "max_model_len": 240}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=18),
    SamplingParams(temperature=1, top_k=8, top_p=0.95, seed=4, max_tokens=10),
    SamplingParams(temperature=1.3, seed=5, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, presence_penalty=0.2),
]


def run(params, *, captured, **options):
    """(completions of three prompts per parameters, the tokens reported, calls, how steps ran).
    Log-probabilities themselves differ in the last bits where a step is padded."""
    if captured:
        options["open_model"] = partial(open_checkpoint, capture=TapeCapture())
    with LLM(NANO, device="cpu", num_threads=1, **SMALL, **options) as llm:
        prompts = [
            encode(llm.tokenizer, render([{"role": "user", "content": each.question}]))
            for each in islice(generate(seed=33), 3)
        ]
        found = [text for each in params for text in llm.generate(prompts, each)]
        calls = dict(llm.engine.stats().program_calls)
    steps = {name: calls.pop(name) for name in tuple(calls) if name.startswith("step:")}
    reported = [[each.token for each in text.logprobs] for text in found]
    return [replace(text, logprobs=()) for text in found], reported, calls, steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "together", "params"), [("match", 2, PARAMS), ("block", 1, PARAMS[1:])]
)
def test_captured_steps_give_what_steps_run_op_by_op_give(rule, together, params):
    """Batches that shrink, guesses cut short at a request's end, logits that the host edits."""
    options = {"drafter": str(DRAFTER), "acceptance": rule, "max_drafts": 4}
    options["max_running"] = together
    *found, steps = run(params, captured=True, **options)
    *expected, eager_steps = run(params, captured=False, **options)
    assert found == expected, "with rounds, accepted guesses and calls"
    assert sum(text.accepted_tokens for text in found[0][:3]) > 12
    assert steps["step:verify:graph"] > 8 and steps["step:verify:graph_to_logits"] > 3
    assert {name for name in steps if name.endswith("eager")} <= {
        "step:prefill:eager",
        "step:mixed:eager",
    }
    assert all(name.endswith("eager") for name in eager_steps)


@pytest.mark.slow
def test_captured_steps_verify_what_the_text_repeats():
    options = {"drafter": "suffix", "max_drafts": 3, "max_running": 1}
    *found, steps = run(PARAMS[:1], captured=True, **options)
    assert found == list(run(PARAMS[:1], captured=False, **options)[:-1])
    assert steps["step:verify:graph"] > 0
