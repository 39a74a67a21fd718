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
from tercel.ops.gemm.linear import CONTRACT, linear

CELL = CONTRACT.cells[1]
PORTABLE = linear.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(linear, cell, PORTABLE, dtype=dtype)


def test_gate_reads_the_rounded_product():
    check_roundings(linear, CELL, PORTABLE)


def test_meta():
    check_meta(linear, CELL, PORTABLE)


def test_replay():
    check_replay(linear, CELL, PORTABLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"].t().contiguous()),
        lambda a: a.update(weight=a["weight"].bfloat16()),
        lambda a: a.update(x=a["x"].t().contiguous().t()),
        lambda a: a.update(sigmoid_from=-1),
        lambda a: a.update(sigmoid_from=1217),
    ],
    ids=["transposed weight", "another dtype", "columns contiguous", "negative", "past the end"],
)
def test_refuses(change):
    check_refusal(linear, CELL, PORTABLE, change)


def test_control_gate_starts_a_column_late():
    def broken(x, weight, *, sigmoid_from):
        return linear(x, weight, sigmoid_from=sigmoid_from + 1)

    check_control(linear, CELL, broken)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(linear, cell, "ordered", dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_ordered_bits_do_not_depend_on_the_other_columns(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(256, 96, generator=generator)
    whole = linear.using("ordered")(x, weight)
    for parts in (2, 16, 128):
        split = [linear.using("ordered")(x, part) for part in weight.chunk(parts)]
        assert torch.equal(torch.cat(split, 1), whole), parts
