import pytest
import torch

from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.ops.gemm.linear_f32 import CONTRACT, linear_f32
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = linear_f32.portable.name
TESTED = implementations(linear_f32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(linear_f32, cell, implementation, dtype=dtype)


def test_meta():
    check_meta(linear_f32, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(linear_f32, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"].bfloat16()),
        lambda a: a.update(weight=a["weight"].t().contiguous()),
    ],
    ids=["weight of another dtype", "transposed weight"],
)
def test_refuses(change):
    check_refusal(linear_f32, CELL, PORTABLE, change)


def test_control_logits_rounded_to_bf16():
    def broken(x, weight):
        return torch.nn.functional.linear(x, weight).float()

    check_control(linear_f32, CELL, broken, dtype=torch.bfloat16)
