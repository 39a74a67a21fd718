"""Binding, packing, recording and hashing, each with a second implementation plugged in."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tercel.blocks.sites import SITES, sites
from tercel.config import EngineConfig
from tercel.contract import PLAIN, Implementation
from tercel.contract.receipt import Status
from tercel.core.arch import Arch
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.rank import Rank
from tercel.core.step import StepClass
from tercel.errors import ConfigError
from tercel.ops.gemm.linear import linear
from tercel.ops.norm.rms_norm import rms_norm
from tercel.targets.binding import bind, counted_table, packs
from tercel.targets.load import meta_cache, resolve
from tercel.targets.program import Program, digest, prove_decode_reads_nothing, record
from tercel.targets.table import TargetRow, generic, portable
from tercel.weights.load import meta_model
from tests.targets.models import FAMILIES, PAGE, Session, checkpoint, program, resolved, tokens

ROW = portable("tp1")


def transposed(weight, *, dtype):
    return (weight.t().contiguous().t(),)


def double_linear(x, weight, *, sigmoid_from=None):
    """Gives twice the product, so that a test sees who ran."""
    return 2 * linear(x, weight, sigmoid_from=sigmoid_from)


def with_implementation(binding, site, implementation):
    """`binding` with another implementation behind one site of every step class."""
    return {
        step_class: {
            **bound,
            site: replace(bound[site], implementation=implementation, reason="test"),
        }
        for step_class, bound in binding.items()
    }


def test_every_site_is_bound_in_every_step_class():
    binding = bind(ROW, Arch.CPU)
    assert set(binding) == set(StepClass)
    assert all(set(bound) == set(SITES) for bound in binding.values())
    assert all(item.op is sites(c)[s] for c, b in binding.items() for s, item in b.items())


def test_generic_falls_to_portable_and_says_why():
    """A prefill's projections have no kernel."""
    bound = bind(generic("tp1"), Arch.SM_90)[StepClass.PREFILL]["o_proj"]
    assert bound.implementation is bound.op.portable
    assert bound.reason.startswith("nothing else serves on sm_90")


def test_a_named_row_must_name_every_site():
    row = TargetRow("x", "sm_90", "tp1", "kimi", "named", {"embed": "portable"})
    with pytest.raises(ConfigError, match="has no implementation"):
        bind(row, Arch.SM_90)


def test_a_second_implementation_runs_and_is_counted():
    session = Session("kimi_k3")
    binding = with_implementation(
        session.program.binding, "latent_up", Implementation("double", double_linear)
    )
    usual = session.program
    session.program = Program(usual.row, binding, usual.weights, usual.groups, usual.place)
    text = tokens(5, 0, "kimi_k3")
    changed = session.step({"a": text})
    assert not torch.allclose(changed, Session("kimi_k3").step({"a": text}))
    moe_layers = sum(map(usual.place.model.is_moe, range(usual.place.model.num_hidden_layers)))
    assert session.program.counts["latent_up:linear:double"] == moe_layers


def test_call_counts_equal_the_recorded_program():
    session = Session("kimi_k3")
    session.program.counts.clear()
    session.step({"a": tokens(5, 0, "kimi_k3")})
    recorded = Counter(
        f"{call.site}:{call.op}:{call.implementation}"
        for call in resolved("kimi_k3").calls[StepClass.PREFILL]
    )
    assert session.program.counts == recorded


def test_packs_reach_the_weights():
    plan = resolved("kimi_k3")
    implementation = Implementation("transposed", double_linear, pack=transposed)
    found = packs(with_implementation(plan.binding, "o_proj", implementation), torch.float32)
    assert {"KdaWeights.o_proj", "MlaWeights.o_proj"} <= set(found)


def test_step_classes_must_share_a_packed_form():
    binding = dict(resolved("kimi_k3").binding)
    decode = dict(binding[StepClass.DECODE])
    other = Implementation("other", double_linear, pack=transposed)
    decode["o_proj"] = replace(decode["o_proj"], implementation=other)
    binding[StepClass.DECODE] = decode
    with pytest.raises(ConfigError, match="o_proj: two step classes want different packed forms"):
        packs(binding, torch.float32)


@pytest.mark.parametrize(
    ("certified", "bound"),
    [
        ({"experts_decode"}, {"portable"}),
        ({"experts_decode", "experts_grouped"}, {"triton"}),
        (set(), {"portable"}),
    ],
    ids=["one of two", "both", "none"],
)
def test_a_kernel_is_bound_only_with_those_that_share_its_form(monkeypatch, certified, bound):
    def status(op, implementation, arch):
        is_certified = op.name in certified and implementation == "triton"
        return Status.CERTIFIED if is_certified else Status.UNTESTED

    monkeypatch.setattr("tercel.targets.binding.status", status)
    binding = bind(generic("tp1"), Arch.SM_90)
    assert {sites["experts"].implementation.name for sites in binding.values()} == bound
    plan = resolved("kimi_k3")
    weights = meta_model(
        plan.place.model, plan.place.layout, 0, dtype=torch.bfloat16,
        packs=packs(binding, torch.bfloat16),
    )  # fmt: skip
    resolution = (
        generic("tp1"), binding, weights, meta_cache(plan.place, 8, torch.bfloat16), plan.place, 8
    )  # fmt: skip
    record(*resolution)  # the packed form passes the contracts
    prove_decode_reads_nothing(*resolution)


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_know_bytes_and_flops(family):
    calls = resolved(family).calls
    assert {StepClass.PREFILL, StepClass.DECODE, StepClass.MIXED} <= set(calls)
    assert all(call.bytes > 0 for items in calls.values() for call in items)
    names = {call.op for call in calls[StepClass.DECODE]}
    assert {"gemv", "kda_decode", "mla_decode", "experts_decode"} <= names
    assert not {"linear", "kda_prefill"} & names


def test_digest_sees_implementations_and_layouts_but_not_status():
    plan = resolved("kimi_k3")
    calls = {c: tuple(replace(x, status="stale") for x in items) for c, items in plan.calls.items()}
    assert digest(plan.route.row, calls) == plan.digest
    changed = {c: tuple(replace(x, implementation="x") for x in i) for c, i in plan.calls.items()}
    assert digest(plan.route.row, changed) != plan.digest
    assert digest(generic("tp2"), plan.calls) != plan.digest


def test_ranks_of_a_layout_record_their_own_shapes():
    model = resolved("kimi_k3").place.model
    layout = Layout.parse("tp2_moetp1ep2")
    row, binding = portable(layout.name), bind(ROW, Arch.CPU)
    digests = []
    for rank in range(2):
        place = Rank(layout, rank, model)
        weights = meta_model(
            model, layout, rank, dtype=torch.float32, packs=packs(binding, torch.float32)
        )
        cache = meta_cache(place, 8, torch.float32)
        calls = record(row, binding, weights, cache, place, 8)
        digests.append(digest(row, calls))
        exchanges = [call for call in calls[StepClass.DECODE] if call.site == "exchange"]
        assert len(exchanges) == 1 + 2 * model.num_hidden_layers + sum(
            model.is_moe(i) for i in range(model.num_hidden_layers)
        )
        assert place.expert_parts[0].first_expert == rank * model.num_experts // 2
    assert digests[0] == digests[1]


def test_a_host_read_in_a_decode_step_is_found():
    def peeks(x, weight, *, sigmoid_from=None):
        return linear(x, weight) * float(x.sum().item() * 0 + 1)

    plan = resolved("kimi_k3")
    binding = with_implementation(plan.binding, "o_proj", Implementation("peeks", peeks))
    weights = meta_model(
        plan.place.model,
        plan.place.layout,
        0,
        dtype=torch.float32,
        packs=packs(plan.binding, torch.float32),
    )
    cache = meta_cache(plan.place, 8, torch.float32)
    with pytest.raises(RuntimeError, match="meta"):
        prove_decode_reads_nothing(plan.route.row, binding, weights, cache, plan.place, 8)


def test_counted_tables_do_not_share_counts():
    first, second = Counter(), Counter()
    bound = {"o_proj": program("kimi_k3").binding[StepClass.PREFILL]["o_proj"]}
    counted_table(bound, first).o_proj(torch.ones(1, 4), torch.ones(2, 4))
    counted_table(bound, second)
    assert (sum(first.values()), sum(second.values())) == (1, 0)


@pytest.mark.parametrize("narrowest", [64, 200])
def test_a_kernel_that_refuses_the_sizes_gives_way(narrowest, monkeypatch):
    """Certified, but not for rows of 128: the site is portable and says why."""

    def refuses(sizes):
        return None if sizes["N"] >= narrowest else f"rows of {sizes['N']}"

    kernel = Implementation("triton", rms_norm.portable.run, admits=refuses)
    held = {name: each for name, each in rms_norm.implementations.items() if name in PLAIN}
    monkeypatch.setattr(rms_norm, "implementations", {**held, "triton": kernel})
    monkeypatch.setattr(
        "tercel.targets.binding.status",
        lambda op, name, arch: Status.CERTIFIED if name == "triton" else Status.UNTESTED,
    )
    model = ModelConfig.load(checkpoint("kimi_k3"))
    config = EngineConfig(model="x", page_size=PAGE)
    plan = resolve(model, config, arch=Arch.CPU, dtype=torch.float32)
    calls = plan.calls[StepClass.MIXED]
    assert {call.site for call in calls if call.op == "rms_norm"} == {"mla_q_norm", "latent_norm"}
    for site in ("mla_q_norm", "latent_norm"):
        bound = plan.binding[StepClass.MIXED][site]
        if narrowest == 64:
            assert bound.implementation is kernel
        else:
            assert bound.implementation is rms_norm.portable
            assert "triton: rows of 128" in bound.reason
