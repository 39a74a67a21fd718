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
from tercel.ops.norm.rms_norm import CONTRACT, rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[0]
PORTABLE = rms_norm.portable.name
TESTED = implementations(rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_two_roundings(implementation):
    check_roundings(rms_norm, CELL, implementation)


def test_meta():
    check_meta(rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(rms_norm, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(x=a["x"].t().contiguous().t()),
        lambda a: a.update(weight=a["weight"].bfloat16()),
        lambda a: a.update(eps="1e-5"),
    ],
    ids=["weight too short", "columns contiguous", "weight of another dtype", "eps is text"],
)
def test_refuses(change):
    check_refusal(rms_norm, CELL, PORTABLE, change)


def test_control_mean_over_one_element_less():
    def broken(x, weight, *, eps):
        mean = x[:, :-1].square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + eps) * weight

    check_control(rms_norm, CELL, broken)
