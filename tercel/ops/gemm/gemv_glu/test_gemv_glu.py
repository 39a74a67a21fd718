import pytest
import torch

from tercel.contract import Cell, Implementation, Op
from tercel.contract.check import check_cell, check_refusal
from tercel.ops.gemm.gemv_glu import CONTRACT, gemv_glu
from tests.gated_products import GatedProduct
from tests.interpreter import INTERPRETED, REASON

CONFIGS = [("held", 4, 4), ("wide", 16, 4, 2, 0), ("wide", 64, 4, 2, 0, 2)]


class TestGemvGlu(GatedProduct):
    op = gemv_glu


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

    check_refusal(gemv_glu, CONTRACT.cells[1], gemv_glu.portable.name, change)
