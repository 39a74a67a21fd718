import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.ops.norm.add_attn_res_rms_norm import CONTRACT, add_attn_res_rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
EXTREMES = (
    Cell("no snapshot", S=0, T=2, N=96, prefix=True),
    Cell("one snapshot, width no power of two", S=1, T=2, N=160, prefix=True),
    Cell("most snapshots", S=11, T=2, N=96, prefix=True),
)
PORTABLE = add_attn_res_rms_norm.portable.name
TESTED = implementations(add_attn_res_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", (*CONTRACT.cells, *EXTREMES), ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(add_attn_res_rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("cell", CONTRACT.cells[1:3], ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(cell, implementation):
    check_roundings(add_attn_res_rms_norm, cell, implementation)


def test_meta():
    check_meta(add_attn_res_rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("cell", CONTRACT.cells[1:3], ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_replay(cell, implementation):
    check_replay(add_attn_res_rms_norm, cell, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(x=a["x"][:-1]),
        lambda a: a.update(prefix=a["prefix"].bfloat16()),
        lambda a: a.update(bank=a["bank"].transpose(1, 2).contiguous().transpose(1, 2)),
        lambda a: a.update(weight=None),
    ],
    ids=["fewer tokens", "prefix of another dtype", "bank with strided rows", "no weight"],
)
def test_refuses(change):
    check_refusal(add_attn_res_rms_norm, CELL, PORTABLE, change)


def test_control_selects_with_the_old_prefix():
    def broken(x, prefix, bank, res_norm, res_proj, weight, *, res_eps, eps):
        options = {"res_eps": res_eps, "eps": eps}
        weights = (bank, res_norm, res_proj, weight)
        normed, _, mixture = add_attn_res_rms_norm(prefix, None, *weights, **options)
        return normed, prefix + x, mixture

    check_control(add_attn_res_rms_norm, CELL, broken)
