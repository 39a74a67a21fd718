import pytest
import torch

from tercel.contract import Cell, Implementation, Op
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.contract.draw import draw
from tercel.ops.gemm.gemv import CONTRACT, gemv
from tests.interpreter import INTERPRETED, REASON, implementations

CELL = CONTRACT.cells[1]
PORTABLE = gemv.portable.name
TESTED = implementations(gemv)
CONFIGS = [
    ("held", 4, 4),
    ("wide", 16, 4, 2, 0),
    ("wide", 64, 4, 3, 0),
    ("wide", 16, 4, 2, 0, 2),
    ("wide", 32, 4, 2, 0, 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(gemv, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_gate_reads_the_rounded_product(implementation):
    check_roundings(gemv, CELL, implementation)


def test_meta():
    check_meta(gemv, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(gemv, CELL, implementation)


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


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
@pytest.mark.parametrize("tokens", [1, 2, 19])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config, tokens):
    """Ragged in every axis, in bf16, with a gate; parts of K are added in one order."""
    from tercel.ops._lib.kernel_gemv import Config, Epilogue, launch

    def run(x, weight, *, sigmoid_from):
        return launch(x, weight, Config(*config), Epilogue(sigmoid_from=sigmoid_from))

    held = (gemv.implementation("reference"), Implementation("probe", run))
    probe = Op(gemv.__wrapped__, CONTRACT, held)
    cell = Cell("ragged", T=tokens, K=328, M=37, sigmoid_from=21, spare=8)
    check_cell(probe, cell, "probe", dtype=torch.bfloat16)


@pytest.mark.parametrize("implementation", TESTED)
def test_rows_do_not_depend_on_their_neighbours(implementation):
    arguments = draw(gemv, CONTRACT.cells[2], dtype=torch.bfloat16)
    x, weight = arguments["x"], arguments["weight"]
    run = gemv.using(implementation)
    before = run(x, weight)
    x[1:] = 10.0
    assert torch.equal(run(x, weight)[0], before[0])
