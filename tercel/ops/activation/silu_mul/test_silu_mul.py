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
from tercel.ops.activation.silu_mul import CONTRACT, silu_mul
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = silu_mul.portable.name
TESTED = implementations(silu_mul)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(silu_mul, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_two_roundings(implementation):
    check_roundings(silu_mul, CELL, implementation)


def test_meta():
    check_meta(silu_mul, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(silu_mul, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(gate_up=a["gate_up"][:, :-1].contiguous()),
        lambda a: a.update(gate_up=a["gate_up"].long()),
        lambda a: a.update(gate_up=a["gate_up"][0]),
    ],
    ids=["odd width", "integers", "no rows"],
)
def test_refuses(change):
    check_refusal(silu_mul, CELL, PORTABLE, change)


def test_control_halves_swapped():
    def broken(gate_up):
        up, gate = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    check_control(silu_mul, CELL, broken)
