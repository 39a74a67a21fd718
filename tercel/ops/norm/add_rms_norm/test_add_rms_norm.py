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
from tercel.ops.norm.add_rms_norm import CONTRACT, add_rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = add_rms_norm.portable.name
TESTED = implementations(add_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(add_rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(add_rms_norm, CELL, implementation)


def test_meta():
    check_meta(add_rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(add_rms_norm, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(residual=a["residual"][:-1]),
        lambda a: a.update(x=a["x"].bfloat16()),
        lambda a: a.update(weight=a["weight"].expand(8, -1)),
    ],
    ids=["fewer tokens", "x of another dtype", "a weight per token"],
)
def test_refuses(change):
    check_refusal(add_rms_norm, CELL, PORTABLE, change)


def test_control_norm_of_x_alone():
    def broken(x, residual, weight, *, eps):
        return torch.rms_norm(x, weight.shape, weight, eps), residual + x

    check_control(add_rms_norm, CELL, broken)
