"""What cells do not show of the MLA kernels: bits, neighbours, scratch, lengths that change."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import draw
from tercel.ops.attention.mla_decode import mla_decode
from tercel.ops.attention.mla_decode.contract import HEAD
from tercel.ops.attention.mla_prefill import mla_prefill
from tercel.ops.attention.mla_prefill.contract import HEAD as EXPANDED
from tests.poison import poisoned_memory

pytestmark = pytest.mark.gpu

SIZES = {"H": 6, "PS": 64, "PAGES": 90, "gated": True}
ROWS = Cell("", **HEAD, **SIZES, width=2, contexts=(700, 3000, 65))
CODES = Cell("", **ROWS.sizes, fp8=True)
SEQUENCES = Cell("", **EXPANDED, **SIZES, cu_seqlens=(0, 300, 500), context_lens=(900, 0))
CALLS = [(mla_decode, ROWS), (mla_decode, CODES), (mla_prefill, SEQUENCES)]


def arguments(op, cell):
    return draw(op, cell, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("op", "cell"), CALLS, ids=["decode", "decode-fp8", "prefill"])
def test_bits_repeat(op, cell):
    drawn, run = arguments(op, cell), op.using("triton")
    first = run(**drawn)
    assert all(torch.equal(run(**drawn), first) for _ in range(5))


@pytest.mark.parametrize(("op", "cell"), CALLS, ids=["decode", "decode-fp8", "prefill"])
def test_scratch_is_not_read_before_it_is_written(op, cell):
    drawn, run = arguments(op, cell), op.using("triton")
    with poisoned_memory():
        assert torch.empty(1, device="cuda").isnan()
        out = run(**drawn)
    assert out.isfinite().all()


def test_rows_do_not_depend_on_their_neighbours():
    drawn, run = arguments(mla_decode, ROWS), mla_decode.using("triton")
    before = run(**drawn)
    drawn["query"][2:] = 7
    drawn["context_lens"][1:] = torch.tensor([1000, 2], device="cuda")
    drawn["pages"][drawn["block_table"][1, :4]] = 5
    assert torch.equal(run(**drawn)[:2], before[:2])


@pytest.mark.parametrize("cell", [ROWS, CODES], ids=["bf16", "fp8"])
def test_lengths_and_tables_change_in_a_graph(cell):
    drawn, run = arguments(mla_decode, cell), mla_decode.using("triton")
    run(**drawn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(**drawn)
    for lengths in ((10, 2500, 600), (60, 0, 1), (0, 2998, 690)):
        drawn["context_lens"].copy_(torch.tensor(lengths))
        if lengths[0] == 10:
            drawn["block_table"].copy_(drawn["block_table"].flip(0).clone())
        graph.replay()
        assert out.isfinite().all()
        assert torch.equal(out, run(**drawn))
