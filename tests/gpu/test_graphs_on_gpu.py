"""Decode steps of nano as CUDA graphs."""

from pathlib import Path

import pytest
import torch

from tercel import LLM, SamplingParams
from tercel.core.step import Row, StepPlan

pytestmark = pytest.mark.gpu

NANO = Path(__file__).parents[2] / "checkpoints/nano"
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[300 + i, 400, 500 + i, 600] * (3 + i) for i in range(4)]


def answers(**options):
    with LLM(NANO, device="cuda", max_running=4, **options) as llm:
        texts = [text.token_ids for text in llm.generate(PROMPTS, PARAMS)]
        return texts, dict(llm.engine.stats().program_calls)


def test_texts_and_counts_are_those_of_steps_run_op_by_op():
    plain, plain_calls = answers(decode_graphs=False)
    texts, calls = answers()
    assert texts == plain
    assert calls == plain_calls


def test_a_step_waits_for_nothing():
    with LLM(NANO, device="cuda", max_running=4) as llm:
        graphs = llm.engine._runner._graphs
        plan = StepPlan(verify=(Row("a", (5,), 0, 1, (1,)),))
        with torch.inference_mode():
            torch.cuda.set_sync_debug_mode("error")
            try:
                logits = graphs.run(plan, graphs.size_of(plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(logits).all()
