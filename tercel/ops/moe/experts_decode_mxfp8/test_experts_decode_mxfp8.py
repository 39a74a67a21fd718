from types import SimpleNamespace

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
    packed,
)
from tercel.contract.draw import draw
from tercel.core import mxfp8
from tercel.errors import CheckFailed
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_decode_mxfp8 import CONTRACT, experts_decode_mxfp8
from tercel.ops.moe.route_quantize import route_quantize
from tests.interpreter import INTERPRETED, REASON

ONE, BATCH = CONTRACT.cells[:2]
SMALL = (
    Cell("one warp a tile, local range", T=2, k=3, E=4, L=64, I=32, total=8, first=2, mxfp4=True),
    Cell("many tokens, local range", T=3, k=2, E=1, L=32, I=32, total=3, first=1, mxfp4=True),
    Cell("SiLU", T=1, k=2, E=2, L=96, I=64, activation="silu", mxfp4=True),
)
TINY = Cell("two rows", T=2, k=1, E=2, L=32, I=32, mxfp4=True)
TRITON = pytest.mark.skipif(not INTERPRETED, reason=REASON)
"""Interpreted: everything but the tensor-core branch, which only a GPU runs. The sum without tensor
cores reads the same tiles and rounds in the same place."""


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_cells(cell, implementation):
    check_cell(experts_decode_mxfp8, cell, implementation)


@TRITON
@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.why)
def test_cells_of_the_kernel(cell):
    check_cell(experts_decode_mxfp8, cell, "triton")


@TRITON
def test_two_warps_a_tile_and_padded_groups(monkeypatch):
    """As with experts of more than 14 groups, at three."""
    monkeypatch.setattr(expert_tiles, "GROUPS_PER_WARP", 2)
    cell = Cell("three groups", T=1, k=1, E=1, L=32, I=96, mxfp4=True)
    check_cell(experts_decode_mxfp8, cell, "triton")


@TRITON
def test_launches_of_their_own_change_no_bit():
    from tercel.ops._lib import kernel_experts as kernels

    chosen = experts_decode_mxfp8.implementation("triton")
    drawn = draw(experts_decode_mxfp8, TINY, dtype=torch.float32)
    arguments = packed(experts_decode_mxfp8, chosen, drawn, torch.float32)
    names = ("activation", "beta", "linear_beta")
    actual = kernels.few_tokens(
        kernels.Rows(arguments["codes"], arguments["scale"], "mxfp8"),
        kernels.Slots(arguments["ids"], arguments["weights"], arguments["first_expert"]),
        tuple(arguments[name] for name in experts_decode_mxfp8.contract.weights),
        kernels.Activation(*(arguments[name] for name in names)),
        config=kernels.Config(turns=1, registers=None, apart=True),
    )
    assert torch.equal(actual, chosen.run(**arguments))


@pytest.mark.parametrize(
    ("cell", "implementation"),
    [(BATCH, "portable"), pytest.param(TINY, "triton", marks=TRITON)],
    ids=["portable", "triton"],
)
def test_roundings(cell, implementation):
    check_roundings(experts_decode_mxfp8, cell, implementation)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_meta(implementation):
    check_meta(experts_decode_mxfp8, ONE, implementation)


@pytest.mark.parametrize(
    ("cell", "implementation"),
    [(BATCH, "portable"), pytest.param(TINY, "triton", marks=TRITON)],
    ids=["portable", "triton"],
)
def test_replay(cell, implementation):
    check_replay(experts_decode_mxfp8, cell, implementation)


@pytest.mark.parametrize(
    ("cell", "implementation"),
    [(BATCH, "portable"), pytest.param(TINY, "triton", marks=TRITON)],
    ids=["portable", "triton"],
)
def test_a_code_that_is_not_a_number_spoils_its_row_alone(cell, implementation):
    chosen = experts_decode_mxfp8.implementation(implementation)
    drawn = draw(experts_decode_mxfp8, cell, dtype=torch.float32)
    drawn["ids"] = drawn["ids"].sort(1).values % cell["E"] + drawn["first_expert"]
    arguments = packed(experts_decode_mxfp8, chosen, drawn, torch.float32)
    expected = chosen.run(**arguments)
    arguments["codes"].view(torch.uint8)[0, 7] = 0x7F
    actual = chosen.run(**arguments)
    assert actual[0].isnan().all() and torch.equal(actual[1:], expected[1:])


def test_reads_what_route_quantize_writes():
    arguments = draw(experts_decode_mxfp8, BATCH, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    logits, z = (torch.randn(8, n, generator=generator) for n in (16, 128))
    routed = route_quantize(logits, torch.zeros(16), z, top_k=4, scaling=2.0)
    names = ("ids", "weights", "codes", "scale")
    arguments.update(dict(zip(names, routed, strict=True)))
    result = experts_decode_mxfp8(**arguments)
    assert result.dtype == torch.bfloat16 and result.isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(
            {
                n: a[n].repeat(9, *[1] * (a[n].dim() - 1))
                for n in ("codes", "scale", "ids", "weights")
            }
        ),
        lambda a: a.update(codes=a["codes"].float()),
        lambda a: a.update(scale=a["scale"][:, :-1].contiguous()),
        lambda a: a.update(w2_scale=None),
        lambda a: a.update(activation="gelu"),
    ],
    ids=["72 tokens", "fp32 rows", "a scale less", "no scale", "another activation"],
)
def test_refuses(change):
    check_refusal(experts_decode_mxfp8, BATCH, "portable", change)


def test_expert_twice_in_a_row_is_invalid():
    check_invalid(experts_decode_mxfp8, BATCH, lambda a: a["ids"][0].fill_(3))


def test_control_rounds_the_scale_down():
    def broken(scale, **rest):
        return experts_decode_mxfp8(
            scale=torch.where(scale == scale.amax(), scale - 1, scale), **rest
        )

    check_control(experts_decode_mxfp8, BATCH, broken)


@pytest.mark.parametrize(
    "wrong",
    [lambda a: a, lambda a: mxfp8.rounded(a.bfloat16().float())],
    ids=["not at all", "twice"],
)
def test_control_rounds_between_the_products_otherwise(wrong, monkeypatch):
    """Within the tolerance, and not within the roundings."""
    changed = SimpleNamespace(dequantize=mxfp8.dequantize, rounded=wrong)
    monkeypatch.setattr("tercel.ops.moe.experts_decode_mxfp8.portable.mxfp8", changed)
    with pytest.raises(CheckFailed, match="carry the reference's bits"):
        check_roundings(experts_decode_mxfp8, BATCH, "portable")
