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
from tercel.ops.norm.gated_rms_norm import CONTRACT, gated_rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = gated_rms_norm.portable.name
TESTED = implementations(gated_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(gated_rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_one_rounding(implementation):
    check_roundings(gated_rms_norm, CELL, implementation)


def test_meta():
    check_meta(gated_rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(gated_rms_norm, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(gate=a["gate"][:, :-1]),
        lambda a: a.update(weight=a["weight"].bfloat16()),
        lambda a: a.update(o=a["o"].flatten(1)),
    ],
    ids=["gate too narrow", "weight not fp32", "o without heads"],
)
def test_refuses(change):
    check_refusal(gated_rms_norm, CELL, PORTABLE, change)


def test_control_norm_over_all_heads():
    def broken(o, gate, weight, *, eps):
        flat = torch.rms_norm(o.flatten(1), gate.shape[1:], None, eps)
        return flat * weight.repeat(o.shape[1]) * torch.sigmoid(gate)

    check_control(gated_rms_norm, CELL, broken)
