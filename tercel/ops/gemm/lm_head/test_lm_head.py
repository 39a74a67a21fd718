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
from tercel.contract.draw import draw
from tercel.ops.gemm.lm_head import CONTRACT, lm_head
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = lm_head.portable.name
TESTED = implementations(lm_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(lm_head, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(lm_head, CELL, implementation)


@pytest.mark.parametrize(
    "implementation", implementations(lm_head, "reference", "portable", "ordered")
)
def test_logits_are_values_of_act(implementation):
    arguments = draw(lm_head, CELL, dtype=torch.bfloat16)
    logits = lm_head.using(implementation)(**arguments)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())


def test_meta():
    check_meta(lm_head, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(lm_head, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"].bfloat16()),
        lambda a: a.update(x=a["x"][0]),
    ],
    ids=["weight of another dtype", "one row without its axis"],
)
def test_refuses(change):
    check_refusal(lm_head, CELL, PORTABLE, change)


def test_control_rows_of_the_head_rolled():
    check_control(lm_head, CELL, lambda x, weight: x @ weight.roll(1, 0).t())


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(lm_head, cell, "ordered", dtype=torch.float32)
