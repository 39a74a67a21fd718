"""The programs that measure, on a random checkpoint: what they see, and that they can fail."""

import random
from functools import partial

import pytest
import torch

from benchmarks.parity import GOAL, MODES, reference_in_fp32, relative_error, texts_of
from benchmarks.planted_faults import FAULTS, with_fault
from benchmarks.recycling import Load, config, figures
from tercel.config import SamplingParams
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine
from tercel.runtime.llm import LLM

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [11, 12]]


def test_relative_error_is_over_everything():
    pairs = [(torch.tensor([1.5, 2.0]), torch.tensor([1.0, 2.0])), (torch.ones(1), torch.ones(1))]
    assert relative_error(iter(pairs)) == 0.25
    assert relative_error(iter([(torch.tensor([torch.nan]), torch.ones(1))])) != 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_parity_of_a_checkpoint(model, mode):
    error = relative_error(mode(str(model), texts_of(str(model), 6)))
    assert 0 < error <= (2 * GOAL if mode is reference_in_fp32 else GOAL)


def outputs(model, resolve):
    open_model = partial(open_checkpoint, resolve=resolve)
    with LLM(model, open_model=open_model, num_threads=1, max_running=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        answers = llm.generate(PROMPTS, params)
    return [token.logprob for answer in answers for token in answer.logprobs]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_planted(model, fault):
    from tercel.targets.load import resolve

    healthy, faulty = outputs(model, resolve), outputs(model, partial(with_fault, FAULTS[fault]))
    assert healthy == outputs(model, resolve)
    assert healthy != faulty


def test_recycling(model):
    engine = Engine(config(model, threads=1, seed=0), open_model=open_checkpoint)
    load = Load(engine, total=40, rng=random.Random(0))
    load.run(lambda done, total: None)
    found = {figure.name: figure for figure in figures(load)}
    assert found["pages in use at the end"].verdict == "met"
    assert found["of these, cancelled"].measured > 0


def test_a_leak_is_seen(model):
    engine = Engine(config(model, threads=1, seed=0), open_model=open_checkpoint)
    load = Load(engine, total=4, rng=random.Random(0))
    load.run(lambda done, total: None)
    engine.add_request("kept", [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    found = {figure.name: figure for figure in figures(load)}
    assert found["pages in use at the end"].verdict == "missed"
    assert found["slots in use at the end"].verdict == "missed"
