import pytest
import torch

from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.contract.draw import draw
from tercel.ops.gemm.head_linear import CONTRACT, head_linear
from tercel.ops.gemm.head_linear import reference as naive
from tests.interpreter import implementations

NANO, _, EMPTY = CONTRACT.cells
PORTABLE = head_linear.portable.name
TESTED = implementations(head_linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(head_linear, cell, implementation, dtype=dtype)


def test_head_by_head():
    a = draw(head_linear, NANO, dtype=torch.float64)
    y = head_linear(**a).view(7, 4, 64)
    for head, x in enumerate(a["x"].view(7, 4, 128).unbind(1)):
        torch.testing.assert_close(y[:, head], x @ a["weight"][head].T)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(head_linear, NANO, implementation)


@pytest.mark.parametrize("cell", [NANO, EMPTY], ids=str)
def test_meta(cell):
    check_meta(head_linear, cell, PORTABLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(x=a["x"][:, :-1]),
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(weight=a["weight"].bfloat16()),
    ],
    ids=["columns", "a head less", "bf16"],
)
def test_refuses(change):
    check_refusal(head_linear, NANO, PORTABLE, change)


def test_control_heads_in_another_order():
    check_control(head_linear, NANO, lambda x, weight: naive.head_linear(x, weight.flip(0)))
