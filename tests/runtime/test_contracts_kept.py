"""What an engine hands to ops keeps their contracts. Bound sites skip that check, which would take
longer than a kernel; kernels read what the contract says, such as rows without gaps."""

from dataclasses import replace
from pathlib import Path

import pytest

from tercel import LLM, SamplingParams
from tercel.core.inputs import StepInputs
from tercel.errors import ContractError
from tercel.runtime import checkpoint
from tercel.targets import binding

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
DRAFTER = str(CHECKPOINTS / "nano-dspark")
GREEDY = SamplingParams(temperature=0, max_tokens=5)
PARAMS = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=5),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=3, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2, presence_penalty=0.5),
]


@pytest.fixture
def checked(monkeypatch):
    """Every call of a bound site through its op, which checks it first."""
    plain = binding.counted

    def counted(name, bound, counts):
        implementation = bound.implementation
        run = bound.op.using(implementation.name)
        return plain(name, replace(bound, implementation=replace(implementation, run=run)), counts)

    for module in (binding, checkpoint):
        monkeypatch.setattr(module, "counted", counted)


def generate(**options):
    """Prompts in several pieces, so that steps mix classes, rows and ways to draw."""
    sizes = {"max_running": 3, "max_step_tokens": 48}
    with LLM(CHECKPOINTS / "nano", device="cpu", **sizes, **options) as llm:
        prompts = [[40 + i, *range(50, 50 + length)] for i, length in enumerate((5, 30, 20))]
        llm.generate(prompts, GREEDY)
        for index, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
            llm.engine.add_request(str(index), prompt, params)
        while llm.engine.has_work:
            llm.engine.step()
        return llm.engine.stats().program_calls


@pytest.mark.parametrize("rule", [None, "match", "block"])
def test_every_call_keeps_its_contract(checked, rule):
    options = {} if rule is None else {"drafter": DRAFTER, "acceptance": rule}
    called = {key.split(":")[1] for key in generate(**options) if not key.startswith("step:")}
    assert {"sample", "penalize", "logprobs", "mla_decode", "kda_prefill"} <= called
    assert ("markov_chain" in called) == ("accept" in called) == (rule is not None)


def test_a_call_that_breaks_one_is_refused(checked, monkeypatch):
    """Drafts with a gap between numbers; kernels take gaps between rows only."""

    def drafts(self):
        rows = self.tokens[self.num_prefill_tokens :].view(-1, self.verify.width)[:, 1:]
        return rows.repeat_interleave(2, -1)[:, ::2]

    monkeypatch.setattr(StepInputs, "drafts", property(drafts))
    with pytest.raises(ContractError, match="drafts: must be rows"):
        generate(drafter=DRAFTER)
