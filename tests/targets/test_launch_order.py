"""No program reads an argument before its wait while the argument's writer may still run."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tercel.config import EngineConfig
from tercel.contract import PLAIN
from tercel.contract.draw import draw
from tercel.contract.receipt import Status
from tercel.core.arch import Arch
from tercel.core.model import ModelConfig
from tercel.core.step import StepClass
from tercel.ops.activation.situ_mul import situ_mul
from tercel.ops.gemm.gemv import gemv
from tercel.ops.gemm.gemv_glu import gemv_glu
from tercel.ops.moe.experts_decode import experts_decode
from tercel.ops.moe.route import route
from tercel.targets.binding import Bound
from tercel.targets.launch_order import LaunchOrder, ReadTooEarly
from tercel.targets.load import resolve
from tercel.targets.recording import Recorder
from tests.targets.models import FAMILIES, PAGE, checkpoint


def over(triggers, at):
    """The launches that are over when launch `at` starts, by definition: the one before it has
    started, and, where it triggers after its wait, that wait is over."""
    if at == 0:
        return set()
    return over(triggers, at - 1) if triggers[at - 1] else set(range(at - 1))


@pytest.mark.parametrize("triggers", list(product((False, True), repeat=4)), ids=str)
def test_every_order(triggers):
    """Of four launches, each of which writes one tensor and triggers early or not."""
    order, tensors = LaunchOrder(), [torch.empty(1) for _ in triggers]
    for at, early in enumerate(triggers):
        for index in range(at):
            is_over = True
            try:
                order.check("site", {"x": tensors[index]}, {"x": ""})
            except ReadTooEarly as error:
                is_over = False
                assert f"while {index}, which writes it" in str(error)
            assert is_over == (index in over(triggers, at))
        order.launched(str(at), [tensors[at]], triggers_early=early)


def test_what_torch_runs_between_counts():
    order, x = LaunchOrder(), torch.empty(2, 2, device="meta")
    with order.watching():
        view, copy = x.t(), x.t().contiguous()
    order.check("site", {"x": view}, {"x": ""})
    with pytest.raises(ReadTooEarly, match="clone, which writes it"):
        order.check("site", {"x": copy}, {"x": ""})


def bound(op, name=None):
    implementation = op.implementation(
        name or next(n for n in op.implementations if n not in PLAIN)
    )
    return Bound(op.name, op, implementation, Status.CERTIFIED, "")


@pytest.mark.parametrize("name", ["portable", "triton"])
def test_only_kernels_read_before_they_wait(name):
    """A layout that adds up as another does cuts its weights as it goes."""
    recorder = Recorder({"gemv": bound(gemv, name)})
    with recorder.order.watching():
        weight = torch.empty(8, 8, device="meta").t().contiguous()
    x = torch.empty(1, 8, device="meta")
    if name in PLAIN:
        recorder.table.gemv(x, weight)
    else:
        with pytest.raises(ReadTooEarly, match="gemv: reads weight"):
            recorder.table.gemv(x, weight)


@pytest.mark.parametrize(
    ("between", "error"),
    [
        ([], "experts_decode: reads ids before it waits, while route, which writes it, may still"),
        (["gemv"], "since then gemv let the next start before waiting; pass ids_early=False"),
        (["gemv", "gemv"], "since then gemv let the next start"),
        (["gemv", "situ_mul"], None),
        (["situ_mul", "gemv"], None),
    ],
    ids=["nothing", "one too early", "two", "settled after", "settled before"],
)
def test_between_routing_and_experts(between, error):
    recorder = Recorder({op.name: bound(op) for op in (route, gemv, situ_mul, experts_decode)})
    drawn = draw(experts_decode, experts_decode.contract.cells[0], dtype=torch.float32)
    arguments = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in drawn.items()}
    logits, x = (torch.empty(1, n, device="meta") for n in (16, 8))
    calls = {
        "gemv": lambda: recorder.table.gemv(x, x),
        "situ_mul": lambda: recorder.table.situ_mul(x, beta=4.0, linear_beta=None),
    }
    for early in (False, True):
        arguments["ids"], arguments["weights"] = recorder.table.route(
            logits, logits[0], top_k=4, scaling=1.0, renormalize=True
        )
        for name in between:
            calls[name]()
        arguments["ids_early"] = early
        if early and error:
            with pytest.raises(ReadTooEarly, match=error):
                recorder.table.experts_decode(**arguments)
        else:
            recorder.table.experts_decode(**arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "late", [False, True], ids=["as it is", "a shared expert that starts others"]
)
def test_the_generic_target_reads_ids_early_where_it_may(family, late, monkeypatch):
    early = replace(gemv_glu.implementation("gluon"), triggers_early=late)
    monkeypatch.setitem(gemv_glu.implementations, "gluon", early)
    monkeypatch.setattr(
        "tercel.targets.binding.status",
        lambda op, name, arch: Status.UNTESTED if name in PLAIN else Status.CERTIFIED,
    )
    model = ModelConfig.load(checkpoint(family))
    config = EngineConfig(model="x", page_size=PAGE)
    plan = resolve(model, config, arch=Arch.SM_90, dtype=torch.bfloat16)
    for step_class in (StepClass.DECODE, StepClass.PREFILL):
        calls = [call for call in plan.calls[step_class] if call.site == "experts"]
        asked = () if late or step_class == StepClass.PREFILL else ("ids_early=True",)
        assert calls and {call.given for call in calls} == {asked}
