"""Ranks on GPUs: exchanges over NCCL have the bits of threads and gloo, and texts those of one GPU.

One GPU runs a group of one rank; groups of more are skipped and counted there.
"""

from pathlib import Path

import pytest

from tercel import LLM, SamplingParams
from tests.parallel.test_groups import run_processes

pytestmark = pytest.mark.gpu

NANO = Path(__file__).parents[2] / "checkpoints/nano"
PARAMS = SamplingParams(temperature=0, max_tokens=40)
PROMPTS = ["Tom has 4 bags with 12 apples each.", "What is 3 * 12?"]


@pytest.mark.parametrize(
    "world_size",
    [
        1,
        pytest.param(2, marks=pytest.mark.gpu(2)),
        pytest.param(4, marks=pytest.mark.gpu(4)),
    ],
)
def test_nccl(world_size, tmp_path):
    run_processes(world_size, "nccl", tmp_path)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["tp2", "tp1_pp2"])
def test_two_gpus_answer_as_one(layout):
    assert answers(layout=layout) == answers()


def answers(**options):
    with LLM(NANO, device="cuda", dtype="float32", **options) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
