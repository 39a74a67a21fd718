import math

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_control, check_refusal, check_replay
from tercel.ops.linear_attention.kda_gate import CONTRACT, kda_gate
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(kda_gate, cell, kda_gate.portable.name, dtype=dtype)


def test_replay():
    check_replay(kda_gate, CELL, kda_gate.portable.name)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(A_log=a["A_log"][:3].clone()),
        lambda a: a.update(dt_bias=a["dt_bias"].bfloat16()),
        lambda a: a.update(lower_bound=5.0),
        lambda a: a.update(lower_bound="-5"),
    ],
    ids=["heads do not divide", "bf16 bias", "positive bound", "bound is text"],
)
def test_refuses(change):
    check_refusal(kda_gate, CELL, kda_gate.portable.name, change)


def test_values_by_hand():
    f, bias, rate = torch.tensor([[1.0, -1.0]]), torch.tensor([0.5, 1.0]), torch.tensor([0.0])
    g = kda_gate(f, rate, bias, lower_bound=-5.0)
    assert g.flatten().tolist() == pytest.approx([-5 / (1 + math.exp(-1.5)), -2.5])
    g = kda_gate(f, rate, bias, lower_bound=None)
    assert g.flatten().tolist() == pytest.approx([-math.log1p(math.exp(1.5)), -math.log(2)])


IMPLEMENTATIONS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=REASON)),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extremes_stay_within_the_bound(implementation):
    f = torch.tensor([[-1e30, 1e30, 0.0, 80.0]])
    zero = torch.zeros(4)
    g = kda_gate.using(implementation)(f, torch.tensor([2.0]), zero, lower_bound=-5.0)
    assert g.isfinite().all() and g.min() >= -5.0 and g.max() <= 0.0


def test_control_softplus_form_clamped():
    def broken(f, A_log, dt_bias, *, lower_bound):
        return kda_gate(f, A_log, dt_bias, lower_bound=None).clamp(min=lower_bound)

    check_control(kda_gate, CELL, broken)


def test_control_rate_per_channel():
    def broken(f, A_log, dt_bias, *, lower_bound):
        heads = A_log.shape[0]
        a = (f + dt_bias).view(-1, dt_bias.shape[0] // heads, heads) * A_log.exp()
        return lower_bound * a.view(f.shape[0], heads, -1).sigmoid()

    check_control(kda_gate, CELL, broken)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slow_decays_keep_their_digits(implementation):
    """A decay that differs from one by far less than fp32's step is still a decay."""
    f = torch.tensor([[-40.0, -20.0, -17.0, -10.0]])
    zero = torch.zeros(4)
    g = kda_gate.using(implementation)(f, torch.tensor([1.0]), zero, lower_bound=None)
    expected = -math.e * torch.log1p(f.double().exp())
    torch.testing.assert_close(g.double().flatten(), expected.flatten(), rtol=1e-6, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
    def test_cells(self, cell, dtype):
        check_cell(kda_gate, cell, "triton", dtype=dtype)

    @pytest.mark.parametrize("bound", [-5.0, None])
    def test_odd_width(self, bound):
        cell = Cell("no power of two", T=19, H=3, K=24, lower_bound=bound)
        check_cell(kda_gate, cell, "triton", dtype=torch.bfloat16)

    def test_replay(self):
        check_replay(kda_gate, CELL, "triton")

    def test_control_bias_of_the_next_channel(self):
        def broken(f, A_log, dt_bias, *, lower_bound):
            run = kda_gate.using("triton")
            return run(f, A_log, dt_bias.roll(1), lower_bound=lower_bound)

        check_control(kda_gate, CELL, broken)
