"""linear_attention/kda_prefill on a GPU, at K3's heads: what the compiler may spoil."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_replay, check_sequence
from tercel.contract.compare import measure
from tercel.contract.draw import draw
from tercel.ops.linear_attention.kda_prefill import kda_prefill
from tercel.ops.linear_attention.kda_prefill import reference as naive
from tests.poison import poison_new_empty

pytestmark = pytest.mark.gpu

CELL = Cell("varlen", H=6, K=128, V=128, SLOTS=9, g_min=-0.5, cu_seqlens=(0, 1, 900, 1500))


@pytest.mark.parametrize("least", [-60.0, -5.0, -0.1, -3e-3, -1e-5])
def test_decays(least):
    """Where tokens forget at once, a row may consist of products that nearly cancel: in bf16, a few
    rows of thousands are further off in units of their own size."""
    sizes = {"H": 2, "K": 128, "V": 128, "SLOTS": 2, "g_min": least, "cu_seqlens": (0, 3000)}
    ours = draw(kda_prefill, Cell("gates", **sizes), dtype=torch.bfloat16, device="cuda")
    exact = {**ours, **{name: ours[name].double() for name in ("qkv", "g", "b", "state")}}
    expected = naive.kda_prefill(**exact)
    o = kda_prefill.using("triton")(**ours)
    assert measure(o, expected).rms_ulps < 2
    assert measure(o, expected).element_ulps < (8 if least > -1 else 64)
    states = measure(ours["state"], exact["state"], torch.bfloat16)
    assert states.rms_ulps < 2 and states.element_ulps < 8


def test_memory_that_was_not_written_is_not_read(monkeypatch):
    poison_new_empty(monkeypatch)
    check_cell(kda_prefill, CELL, "triton", dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_in_several_calls(dtype):
    options = {"steps": 4, "dtype": dtype, "device": "cuda"}
    check_sequence(kda_prefill, CELL, "triton", **options)


def test_segments():
    cell = Cell("long", H=4, K=128, V=128, SLOTS=4, g_min=-1e-3, cu_seqlens=(0, 5000, 7000))
    check_cell(kda_prefill, cell, "triton", dtype=torch.bfloat16, device="cuda")


def test_bits_repeat_and_do_not_depend_on_neighbours():
    together = draw(kda_prefill, CELL, dtype=torch.bfloat16, device="cuda")
    alone = {**together, "state": together["state"].clone()}
    again = {**together, "state": together["state"].clone()}
    run = kda_prefill.using("triton")
    o = run(**together)
    assert torch.equal(run(**again), o)
    rows = slice(1, 900)
    alone.update({name: together[name][rows] for name in ("qkv", "g", "b")})
    alone.update(slots=together["slots"][1:2], cu_seqlens=(0, 899), fresh=together["fresh"][1:2])
    assert torch.equal(run(**alone), o[rows])


def test_replay():
    check_replay(kda_prefill, CELL, "triton", dtype=torch.bfloat16, device="cuda")
