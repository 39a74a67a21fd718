"""KDA's kernels at published sizes on a GPU: sequences, neighbours, refusals, unwritten memory."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_replay, check_sequence
from tercel.contract.draw import draw
from tercel.errors import ContractError
from tercel.ops._lib.kda import HEAD, SMALL_HEAD
from tercel.ops.linear_attention.kda_decode import kda_decode
from tercel.ops.linear_attention.kda_verify import kda_verify
from tests.poison import poisoned_memory

pytestmark = pytest.mark.gpu

LAYERS = [(6, -5.0), (12, -5.0), (96, -5.0), (32, None), (4, -5.0)]
"""Heads and bound: ranks of 16 and 8, all of K3, Kimi-Linear, nano."""


def cell_of(op, heads, bound, rows=3, head=HEAD):
    sizes = {"S": 3} if op is kda_decode else {"width": 8, "D": 7}
    sizes |= {"R": rows, "H": heads, "SLOTS": rows + 2, "lower_bound": bound}
    return Cell("", **sizes, **head)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("heads", "bound"), LAYERS)
@pytest.mark.parametrize("op", [kda_decode, kda_verify], ids=str)
def test_sequences(op, heads, bound, dtype):
    cell = cell_of(op, heads, bound)
    check_sequence(op, cell, "triton", steps=4, dtype=dtype, device="cuda")


@pytest.mark.parametrize("op", [kda_decode, kda_verify], ids=str)
def test_replay_with_rewritten_inputs(op):
    check_replay(op, cell_of(op, 6, -5.0), "triton", dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("rows", [2, 8, 64])
@pytest.mark.parametrize("op", [kda_decode, kda_verify], ids=str)
def test_rows_do_not_depend_on_their_neighbours(op, rows):
    cell = cell_of(op, 6, -5.0, rows)
    first, second = (draw(op, cell, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    width, slots = first.get("width", 1), first["slots"]
    second["qkv"][width:] = 3.0
    second["recurrent"][slots[1:]] = 7.0
    run = op.using("triton")
    assert torch.equal(run(**first)[:width], run(**second)[:width])
    assert torch.equal(first["recurrent"][slots[0]], second["recurrent"][slots[0]])


@pytest.mark.parametrize("op", [kda_decode, kda_verify], ids=str)
def test_memory_that_nobody_wrote_is_not_read(op):
    with poisoned_memory():
        arguments = draw(op, cell_of(op, 6, -5.0), dtype=torch.bfloat16, device="cuda")
        assert op.using("triton")(**arguments).isfinite().all()


def test_refuses_heads_that_are_no_power_of_two():
    cell = cell_of(kda_decode, 2, -5.0, head={**SMALL_HEAD, "V": 24})
    with pytest.raises(ContractError, match="power of two"):
        kda_decode.using("triton")(**draw(kda_decode, cell, dtype=torch.float32, device="cuda"))
