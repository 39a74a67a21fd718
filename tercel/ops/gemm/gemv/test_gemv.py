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
from tercel.ops.gemm.gemv import CONTRACT, gemv

CELL = CONTRACT.cells[1]
PORTABLE = gemv.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(gemv, cell, PORTABLE, dtype=dtype)


def test_gate_reads_the_rounded_product():
    check_roundings(gemv, CELL, PORTABLE)


def test_meta():
    check_meta(gemv, CELL, PORTABLE)


def test_replay():
    check_replay(gemv, CELL, PORTABLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(x=a["x"].repeat(9, 1)),
        lambda a: a.update(weight=a["weight"][:, :-1].contiguous()),
        lambda a: a.update(sigmoid_from=1217),
    ],
    ids=["72 rows", "weight too narrow", "gate past the end"],
)
def test_refuses(change):
    check_refusal(gemv, CELL, PORTABLE, change)


def test_control_drops_the_last_input():
    def broken(x, weight, *, sigmoid_from):
        return gemv(x[:, :-1], weight[:, :-1].contiguous(), sigmoid_from=sigmoid_from)

    check_control(gemv, CELL, broken)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(gemv, cell, "ordered", dtype=torch.float32)
