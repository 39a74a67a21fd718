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
from tercel.ops.norm.attn_res_rms_norm import CONTRACT, attn_res_rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = attn_res_rms_norm.portable.name
TESTED = implementations(attn_res_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(attn_res_rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(attn_res_rms_norm, CELL, implementation)


def test_meta():
    check_meta(attn_res_rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(attn_res_rms_norm, CELL, implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(prefix=a["prefix"][:-1]),
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(bank=None),
        lambda a: a.update(res_eps=0),
    ],
    ids=["fewer tokens", "weight too short", "no bank", "eps is an integer"],
)
def test_refuses(change):
    check_refusal(attn_res_rms_norm, CELL, PORTABLE, change)


def test_control_prefix_is_not_a_source():
    def broken(bank, prefix, res_norm, res_proj, weight, *, res_eps, eps):
        return attn_res_rms_norm(
            bank[1:], bank[0], res_norm, res_proj, weight, res_eps=res_eps, eps=eps
        )

    check_control(attn_res_rms_norm, CELL, broken)
