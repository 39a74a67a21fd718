"""What cells do not show of the MLA kernels: bits, neighbours, scratch, lengths that change."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.draw import draw
from tercel.ops.attention.mla_append import mla_append
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
FEW = Cell("", **{**ROWS.sizes, "width": 1})
FEW_CODES = Cell("", **FEW.sizes, fp8=True)
MANY = Cell("", **{**ROWS.sizes, "width": 8})
EVERY = Cell("", **{**FEW.sizes, "H": 96})
DECODE = {
    "triton": (ROWS, "triton"),
    "triton-fp8": (CODES, "triton"),
    "gluon": (FEW, "gluon"),
    "gluon-fp8": (FEW_CODES, "gluon"),
    "gluon_sm_90": (MANY, "gluon_sm_90"),
    "gluon_sm_90-heads": (EVERY, "gluon_sm_90"),
}
CALLS = {name: (mla_decode, *call) for name, call in DECODE.items()}
CALLS["prefill"] = (mla_prefill, SEQUENCES, "triton")


def arguments(op, cell):
    return draw(op, cell, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("op", "cell", "name"), CALLS.values(), ids=CALLS)
def test_bits_repeat(op, cell, name):
    drawn, run = arguments(op, cell), op.using(name)
    first = run(**drawn)
    assert all(torch.equal(run(**drawn), first) for _ in range(5))


@pytest.mark.parametrize(("op", "cell", "name"), CALLS.values(), ids=CALLS)
def test_scratch_is_not_read_before_it_is_written(op, cell, name):
    drawn, run = arguments(op, cell), op.using(name)
    with poisoned_memory():
        assert torch.empty(1, device="cuda").isnan()
        out = run(**drawn)
    assert out.isfinite().all()


@pytest.mark.parametrize(("cell", "name"), DECODE.values(), ids=DECODE)
def test_rows_do_not_depend_on_their_neighbours(cell, name):
    drawn, run = arguments(mla_decode, cell), mla_decode.using(name)
    before, width = run(**drawn), cell["width"]
    drawn["query"][width:] = 7
    drawn["context_lens"][1:] = torch.tensor([1000, 2], device="cuda")
    drawn["pages"][drawn["block_table"][1, :4]] = 5
    assert torch.equal(run(**drawn)[:width], before[:width])


@pytest.mark.parametrize(("cell", "name"), DECODE.values(), ids=DECODE)
def test_lengths_and_tables_change_in_a_graph(cell, name):
    drawn, run = arguments(mla_decode, cell), mla_decode.using(name)
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


@pytest.mark.parametrize(
    ("cell", "name"),
    [(FEW, "gluon"), (FEW_CODES, "gluon"), (EVERY, "gluon_sm_90")],
    ids=["bf16", "fp8", "heads"],
)
def test_a_step_reads_its_own_entries_after_the_launch_that_writes_them(cell, name):
    """Nothing lies between the launches of a graph: the first tiles of a call are on their way
    while its row's newest entry is still being written."""
    drawn = arguments(mla_decode, cell)
    decode, append = mla_decode.using(name), mla_append.using("triton")
    lengths, pages, scale = drawn["context_lens"], drawn["pages"], drawn["page_scale"]
    page = drawn["block_table"].gather(1, (lengths // 64)[:, None])[:, 0]
    slots, norm = page * 64 + lengths % 64, torch.ones(HEAD["L"], device="cuda").bfloat16()
    latents = 9 * torch.randn(30, len(lengths), HEAD["E"], device="cuda").bfloat16()

    def step(latent):
        append(latent, norm, pages, slots, eps=1e-6, page_scale=scale)
        return decode(**drawn)

    apart = []
    for latent in latents:
        apart.append(step(latent))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step(latent) for latent in latents]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(out, alone) for out, alone in zip(outs, apart, strict=True))
    assert not torch.equal(apart[0], apart[1])
