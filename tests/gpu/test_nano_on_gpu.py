"""The engine on a GPU: nano answers fresh problems in bf16, alone and in a batch."""

from itertools import islice
from pathlib import Path

import pytest

from tercel import LLM, SamplingParams
from tercel.gates.problems import extract_answer, generate

pytestmark = pytest.mark.gpu

NANO = Path(__file__).parents[2] / "checkpoints/nano"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers(dtype):
    problems = list(islice(generate(seed=21), 24))
    conversations = [[{"role": "user", "content": problem.question}] for problem in problems]
    with LLM(NANO, device="cuda", dtype=dtype) as llm:
        answers = [
            llm.chat(conversation, SamplingParams(temperature=0, max_tokens=400))
            for conversation in conversations[:4]
        ]
    right = [extract_answer(a.content) == p.answer for a, p in zip(answers, problems, strict=False)]
    assert sum(right) >= 3
