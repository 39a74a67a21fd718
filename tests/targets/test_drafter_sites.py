"""What stands behind a drafter's sites: certified kernels that serve its sizes, else portable forms
that are counted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tercel.contract.receipt import Status
from tercel.core.arch import Arch
from tercel.core.cache import DrafterCache
from tercel.core.drafter_formats import drafter_config
from tercel.core.drafting import Block, DraftSampling
from tercel.core.group import SingleGroup
from tercel.core.layout import Layout
from tercel.targets import binding
from tercel.targets.drafters import DrafterPlan, block
from tercel.targets.table import generic, portable
from tercel.weights.drafter import dummy_drafter
from tercel.weights.tiny_drafter import tiny_drafter_config
from tests.targets.test_drafter_block import TARGET, V


def plan_of(format="specforge", **changes):
    config = drafter_config(tiny_drafter_config(format, TARGET, changes))
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    table = torch.randn(V, 64)
    weights = dummy_drafter(config, Layout(), 0, **kind)
    return DrafterPlan(
        generic("tp1"), Arch.SM_90, config, weights, table, table, SingleGroup(), Counter()
    )


def certify(monkeypatch, *ops):
    """Says that the Triton kernels of these ops, or of all, are certified."""

    def status(op, name, arch):
        chosen = name == "triton" and (not ops or op.name in ops)
        return Status.CERTIFIED if chosen else Status.UNTESTED

    monkeypatch.setattr(binding, "status", status)


def draft(drafter, requests=1):
    config = drafter.plan.config
    cache = DrafterCache(
        torch.zeros(config.num_hidden_layers, 3, 16, *config.attention.entry_shape(1))
    )
    numbers = torch.arange(requests)
    guessed = Block(numbers, torch.full_like(numbers, 5), torch.ones(requests, 2).long(), 7)
    sampling = DraftSampling(torch.zeros(requests), numbers, greedy=True)
    drafter.write_context(
        torch.randn(5, len(config.taps) * 64), torch.arange(5), torch.arange(16, 21), cache
    )
    return drafter.draft(guessed, sampling, cache)[0]


def test_certified_kernels_that_serve_the_sizes_are_bound(monkeypatch):
    certify(monkeypatch)
    plan = plan_of()
    few, many = block.bind_drafter(plan, rows=1), block.bind_drafter(plan, rows=65)
    for site in ("context_fc", "proj", "o_proj", "down"):
        assert (few[site].op.name, few[site].implementation.name) == ("gemv", "triton")
        assert (many[site].op.name, many[site].implementation.name) == ("linear", "portable")
    assert (few["glu"].op.name, many["glu"].op.name) == ("gemv_glu", "linear_glu")
    for bound in (few, many):
        kernels = {item.site for item in bound.values() if "triton" in item.op.implementations}
        assert {x for x in bound if bound[x].implementation.name == "triton"} == kernels
        assert "attention" in kernels and "head" in kernels


@pytest.mark.parametrize("arch", [Arch.SM_90, Arch.CPU])
def test_a_portable_target_drafts_portably(monkeypatch, arch):
    certify(monkeypatch)
    plan = replace(plan_of(), row=portable("tp1"), arch=arch)
    bound = block.bind_drafter(plan, rows=1)
    assert {item.implementation for item in bound.values()} == {
        item.op.portable for item in bound.values()
    }


def test_another_geometry_runs_the_portable_block_counted_and_reported(monkeypatch, caplog):
    """Heads of 24 channels: the kernel is certified, but not for them."""
    caplog.set_level("INFO")
    certify(monkeypatch, "block_attention_qk_norm_rope")
    plan = plan_of(head_dim=24)
    drafter = block.create(plan)
    assert draft(drafter).shape == (1, 7)
    layers = plan.config.num_hidden_layers
    assert plan.counts["drafter.attention:block_attention_qk_norm_rope:portable"] == layers
    assert not [key for key in plan.counts if key.endswith(":triton")]
    (line,) = (x for x in caplog.messages if x.startswith("drafter.attention:"))
    assert "triton: D=24; its head sizes are" in line


def test_an_uncertified_kernel_gives_way_counted_and_reported(monkeypatch, caplog):
    caplog.set_level("INFO")
    certify(monkeypatch, "nothing")
    plan = plan_of("k3_dspark")
    drafter = block.create(plan)
    assert draft(drafter).shape == (1, 7)
    layers = plan.config.num_hidden_layers
    assert plan.counts["drafter.mla_attention:block_attention:portable"] == layers
    (line,) = (x for x in caplog.messages if x.startswith("drafter.mla_attention:"))
    assert "triton: untested" in line


def test_blocks_of_more_rows_than_gemv_serves_take_the_general_ops(monkeypatch, caplog):
    certify(monkeypatch, "nothing")
    caplog.set_level("INFO")
    plan = plan_of()
    drafter = block.create(plan)
    (line,) = (x for x in caplog.messages if x.startswith("drafter.proj above"))
    assert "64 rows: linear" in line and "there is no kernel" in line
    few = draft(drafter, 9)
    assert not plan.counts["drafter.proj:linear:portable"]
    many = draft(drafter, 10)
    layers = plan.config.num_hidden_layers
    assert plan.counts["drafter.proj:gemv:portable"] == layers
    assert plan.counts["drafter.proj:linear:portable"] == layers
    assert few.shape == (9, 7) and many.shape == (10, 7)
