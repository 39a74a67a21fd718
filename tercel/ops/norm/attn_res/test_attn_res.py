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
from tercel.contract.draw import draw
from tercel.ops.norm.attn_res import CONTRACT, attn_res
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = attn_res.portable.name
TESTED = implementations(attn_res)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(attn_res, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(attn_res, CELL, implementation)


def test_meta():
    check_meta(attn_res, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(attn_res, CELL, implementation)


@pytest.mark.parametrize("implementation", implementations(attn_res, "reference", "portable"))
def test_without_snapshots_it_is_the_prefix(implementation):
    arguments = draw(attn_res, CONTRACT.cells[3], dtype=torch.float32)
    mixture = attn_res.using(implementation)(**arguments)
    assert torch.equal(mixture, arguments["prefix"])
    assert mixture.data_ptr() != arguments["prefix"].data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(bank=a["bank"][:, :-1]),
        lambda a: a.update(bank=a["bank"][0]),
        lambda a: a.update(res_proj=a["res_proj"].unsqueeze(0)),
        lambda a: a.update(res_norm=a["res_norm"].bfloat16()),
    ],
    ids=["fewer tokens in the bank", "one snapshot", "published proj shape", "another dtype"],
)
def test_refuses(change):
    check_refusal(attn_res, CELL, PORTABLE, change)


def test_control_mixes_normalised_rows():
    def broken(bank, prefix, res_norm, res_proj, *, eps):
        rows = torch.cat([bank, prefix.unsqueeze(0)])
        normed = torch.rms_norm(rows, res_norm.shape, None, eps)
        shares = torch.softmax((normed * res_norm * res_proj).sum(-1, keepdim=True), 0)
        return (shares * normed).sum(0)

    check_control(attn_res, CELL, broken)
