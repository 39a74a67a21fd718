import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.ops.activation.situ_mul import CONTRACT, situ_mul
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = situ_mul.portable.name
TESTED = implementations(situ_mul)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(situ_mul, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_one_rounding(implementation):
    check_roundings(situ_mul, CELL, implementation)


def test_meta():
    check_meta(situ_mul, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(situ_mul, CELL, implementation)


def test_is_bounded():
    y = situ_mul(torch.full((1, 64), 1e30), beta=4.0, linear_beta=25.0)
    assert torch.equal(y, torch.full((1, 32), 100.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(gate_up=a["gate_up"][:, :-1].contiguous()),
        lambda a: a.update(beta=0.0),
        lambda a: a.update(linear_beta=0.0),
        lambda a: a.update(linear_beta=25),
    ],
    ids=["odd width", "beta 0", "linear_beta 0", "linear_beta is an integer"],
)
def test_refuses(change):
    check_refusal(situ_mul, CELL, PORTABLE, change)


def test_control_clamps_where_tanh_saturates():
    def broken(gate_up, *, beta, linear_beta):
        gate, up = gate_up.chunk(2, -1)
        bounded = gate.clamp(-beta, beta) * torch.sigmoid(gate)
        return bounded * up.clamp(-linear_beta, linear_beta)

    check_control(situ_mul, CELL, broken)
