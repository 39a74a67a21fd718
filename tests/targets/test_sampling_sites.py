"""What stands behind a sampler's sites, and that nothing else turns logits into tokens."""

from collections import Counter

import pytest
import torch

from tercel.contract.receipt import Status
from tercel.core.arch import Arch
from tercel.core.group import SingleGroup
from tercel.core.sampling import RowSampling
from tercel.core.step import Row, StepPlan
from tercel.runtime.sampler import Sampler
from tercel.targets import binding
from tercel.targets.binding import SAMPLING, bind_sites, counted
from tercel.targets.table import generic, portable
from tests.runtime.steps import drawn

CPU = torch.device("cpu")


@pytest.fixture
def certified(monkeypatch):
    """Says that every Triton kernel is certified."""
    monkeypatch.setattr(
        binding,
        "status",
        lambda op, name, arch: Status.CERTIFIED if name == "triton" else Status.UNTESTED,
    )


def test_every_site_runs_its_certified_kernel(certified):
    bound = bind_sites(generic("tp1"), Arch.SM_90, SAMPLING)
    assert {item.implementation.name for item in bound.values()} == {"triton"}
    assert bound.keys() == SAMPLING.keys() >= {"sample", "accept", "penalize", "logprobs"}


@pytest.mark.parametrize("arch", [Arch.SM_90, Arch.CPU])
def test_a_portable_target_samples_portably(certified, arch):
    bound = bind_sites(portable("tp1"), arch, SAMPLING)
    assert all(item.implementation is item.op.portable for item in bound.values())


def test_a_sampler_calls_ops_through_its_sites_alone(monkeypatch):
    """A step with a filter, a penalty, log probabilities and drafts calls each site once; without
    the table nothing is left to call."""
    calls: Counter[str] = Counter()
    bound = bind_sites(portable("tp1"), Arch.CPU, SAMPLING)
    table = {site: counted(site, item, calls) for site, item in bound.items()}
    sampler = Sampler(SingleGroup(), [], CPU, sites=table)
    sampling = RowSampling(
        seed=3, temperature=1.0, top_k=5, logprobs=2, repetition_penalty=2.0, history=((1, 1),)
    )
    plain = Row("a", (1,), 8, 1, (1,), sampling=sampling)
    drafted = Row("b", (1, 2, 3), 8, 2, (2,), sampling=sampling, num_drafts=2)
    for row in (plain, drafted):
        rows = len(row.tokens)
        plan = StepPlan(verify=(row,), num_drafts=row.num_drafts)
        (result,) = drawn(sampler, torch.randn(rows, 32), plan)
        assert result.is_finite and len(result.logprobs[0].top) == 2
    names = {f"{site}:{site}:{item.implementation.name}" for site, item in bound.items()}
    assert calls.keys() == names and calls["sample:sample:portable"] == 1
    assert calls["logprobs:logprobs:reference"] == calls["penalize:penalize:reference"] == 2
