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
from tercel.ops.gemm.gemv_glu import CONTRACT, gemv_glu
from tests.interpreter import INTERPRETED, REASON, implementations

CELL = CONTRACT.cells[1]
PORTABLE = gemv_glu.portable.name
TESTED = implementations(gemv_glu)
CONFIGS = [("held", 4, 4), ("wide", 16, 4, 2, 0), ("wide", 64, 4, 2, 0, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(gemv_glu, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(gemv_glu, cell, "ordered", dtype=torch.float32)


@pytest.mark.parametrize("implementation", TESTED)
def test_activation_reads_the_rounded_products(implementation):
    check_roundings(gemv_glu, CONTRACT.cells[0], implementation)


def test_meta():
    check_meta(gemv_glu, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(gemv_glu, CELL, implementation)


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
    assert names in str(check_refusal(gemv_glu, CELL, PORTABLE, change))


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
        return gemv_glu(x, pairs(weight), **activation)

    check_control(gemv_glu, CELL, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config, activation):
    """Ragged in every axis, in bf16; parts of K are added before the activation."""
    from tercel.ops._lib.kernel_activation import Activation
    from tercel.ops._lib.kernel_gemv import Config, Epilogue, launch

    def run(x, weight, *, activation, beta, linear_beta):
        gated = Epilogue(activation=Activation(activation, beta, linear_beta))
        return launch(x, weight, Config(*config), gated)

    held = (gemv_glu.implementation("reference"), Implementation("probe", run))
    probe = Op(gemv_glu.__wrapped__, CONTRACT, held)
    cell = Cell("ragged", T=3, K=144, I=19, activation=activation, spare=8)
    check_cell(probe, cell, "probe", dtype=torch.bfloat16)


def test_refuses_more_rows_than_a_decode_step_has():
    def change(arguments):
        arguments.update(x=arguments["x"].repeat(9, 1))

    check_refusal(gemv_glu, CELL, PORTABLE, change)
