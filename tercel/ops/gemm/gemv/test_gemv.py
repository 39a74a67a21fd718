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
    draw,
)
from tercel.ops.gemm.gemv import CONTRACT, gemv
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[1]
PORTABLE = gemv.portable.name
interpreted = pytest.mark.skipif(not INTERPRETED, reason=REASON)
CONFIGS = [(4, 4), (16, 4, 8, 64), (16, 2, 16, 32)]


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


@interpreted
class TestTriton:
    """Both kernels, interpreted: each launch configuration, ragged in every axis."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", CONTRACT.cells[:3], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(gemv, cell, "triton", dtype=dtype)

    @pytest.mark.parametrize("tokens", [1, 2, 9])
    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_configurations(self, config, tokens):
        from tercel.ops.gemm.gemv.kernel_triton import Config, launch

        def run(x, weight, *, sigmoid_from):
            return launch(x, weight, sigmoid_from, Config(*config))

        held = (gemv.implementation("reference"), Implementation("probe", run))
        probe = Op(gemv.__wrapped__, CONTRACT, held)
        cell = Cell("ragged", T=tokens, K=328, M=37, sigmoid_from=21, spare=8)
        check_cell(probe, cell, "probe", dtype=torch.bfloat16)

    def test_gate_reads_the_rounded_product(self):
        check_roundings(gemv, CONTRACT.cells[0], "triton")

    def test_replay(self):
        check_replay(gemv, CONTRACT.cells[2], "triton")

    def test_rows_do_not_depend_on_their_neighbours(self):
        arguments = draw(gemv, CONTRACT.cells[2], dtype=torch.bfloat16)
        x, weight = arguments["x"], arguments["weight"]
        run = gemv.using("triton")
        before = run(x, weight)
        x[1:] = 1e30
        assert torch.equal(run(x, weight)[0], before[0])
