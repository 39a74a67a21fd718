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
from tercel.ops.gemm.linear_glu import CONTRACT, linear_glu
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = linear_glu.portable.name
TESTED = implementations(linear_glu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(linear_glu, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(linear_glu, cell, "ordered", dtype=torch.float32)


@pytest.mark.parametrize("implementation", TESTED)
def test_activation_reads_the_rounded_products(implementation):
    check_roundings(linear_glu, CONTRACT.cells[0], implementation)


def test_meta():
    check_meta(linear_glu, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(linear_glu, CELL, implementation)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda a: a.update(weight=a["weight"][:-1]), "weight"),
        (lambda a: a.update(activation="gelu"), "activation"),
        (lambda a: a.update(activation="situ", beta=None), "beta"),
    ],
    ids=["odd number of rows", "unknown activation", "no beta"],
)
def test_refuses(change, names):
    assert names in str(check_refusal(linear_glu, CELL, PORTABLE, change))


@pytest.mark.parametrize(
    "pairs",
    [
        lambda weight: weight.roll(len(weight) // 2, 0),
        lambda weight: torch.cat([weight[::2], weight[1::2]]),
    ],
    ids=["halves exchanged", "rows in turn"],
)
def test_control_pairs_other_rows(pairs):
    def broken(x, weight, **activation):
        return linear_glu(x, pairs(weight), **activation)

    check_control(linear_glu, CELL, broken)
