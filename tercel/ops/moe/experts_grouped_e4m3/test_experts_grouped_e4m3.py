import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_refusal,
    check_replay,
)
from tercel.contract.check import packed as packed_arguments
from tercel.contract.draw import draw
from tercel.core import mxfp4, mxfp8
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_grouped.reference import activation_of, weighted_sum
from tercel.ops.moe.experts_grouped_e4m3 import CONTRACT, experts_grouped_e4m3
from tercel.ops.moe.experts_grouped_e4m3.reference import SPAN
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[2]
PLAIN = "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(experts_grouped_e4m3, cell, PLAIN, dtype=dtype)


def test_replay():
    check_replay(experts_grouped_e4m3, CELL, PLAIN)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(w2_scale=a["w2_scale"][..., :-1].contiguous()),
        lambda a: a.update(w13=a["w13"].to(torch.int32)),
        lambda a: a.update(w2_largest=a["w2_scale"].amax(-1)),
        lambda a: a.update(ids=a["ids"].int()),
        lambda a: a.update(activation="gelu"),
        lambda a: a.update(beta=None),
    ],
    ids=["scales short", "i32 codes", "largest of codes", "i32 ids", "activation", "no beta"],
)
def test_refuses(change):
    check_refusal(experts_grouped_e4m3, CELL, PLAIN, change)


def test_expert_twice_in_a_row_is_invalid():
    check_invalid(experts_grouped_e4m3, CELL, lambda a: a["ids"][0].fill_(3))


def formula(z, ids, weights, w13, w13_scale, w2, w2_scale, seen, seen_inside, **rest):
    """The op with other roundings of the rows that products see."""
    w13, w2 = (mxfp4.dequantize(w, s, z.dtype) for w, s in ((w13, w13_scale), (w2, w2_scale)))
    activate = activation_of(rest["activation"], rest["beta"], rest["linear_beta"])
    return weighted_sum(
        seen(z), ids, weights, w13, w2, rest["first_expert"], lambda h: seen_inside(activate(h))
    )


def in_rows(x):
    return mxfp8.rounded(x, block=x.shape[-1])


def test_rows_are_e4m3_times_a_power_of_two():
    arguments = draw(experts_grouped_e4m3, CELL, dtype=torch.float32)
    expected = experts_grouped_e4m3(**arguments)
    assert torch.equal(formula(**arguments, seen=in_rows, seen_inside=in_rows), expected)
    scaled = in_rows(arguments["z"]) * 448 / arguments["z"].abs().amax(-1, keepdim=True)
    largest = in_rows(arguments["z"]).abs().amax(-1)
    assert bool((scaled.abs() <= 448 * 1.07).all()) and bool((largest > 0).all())


@pytest.mark.parametrize(
    ("seen", "seen_inside"),
    [
        (in_rows, lambda x: x),
        (lambda x: x, in_rows),
        (lambda x: in_rows(x / 1.75) * 1.75, in_rows),
    ],
    ids=["h not rounded", "z not rounded", "no power of two"],
)
def test_control_of_roundings(seen, seen_inside):
    def broken(**arguments):
        return formula(**arguments, seen=seen, seen_inside=seen_inside)

    check_control(experts_grouped_e4m3, CELL, broken)


def test_a_row_keeps_some_binades_of_scales():
    arguments = draw(experts_grouped_e4m3, CELL, dtype=torch.float32)
    scale = arguments["w13_scale"]
    scale[:, :, 0] = 124
    scale[:, :, 1] = 124 - SPAN
    kept = experts_grouped_e4m3(**arguments)
    scale[:, :, 1] = 124 - SPAN - 1
    assert torch.equal(experts_grouped_e4m3(**arguments), kept)
    scale[:, :, 1] = 124 - SPAN + 1
    assert not torch.equal(experts_grouped_e4m3(**arguments), kept)


SMALL = (
    Cell("local range", T=5, k=2, E=3, L=64, I=32, total=6, first=2),
    Cell("experts with SiLU", T=6, k=2, E=3, L=64, I=64, activation="silu"),
    Cell("no token on this rank", T=2, k=2, E=1, L=64, I=32, total=9, first=9),
)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Interpreted: scales are applied in fp32 instead of by the packed product that a GPU runs."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.why)
    def test_cells(self, cell, dtype):
        check_cell(experts_grouped_e4m3, cell, "triton", dtype=dtype)

    def test_two_warps_a_tile_and_padded_groups(self, monkeypatch):
        """As with a latent of more than 14 groups, at three."""
        monkeypatch.setattr(expert_tiles, "GROUPS_PER_WARP", 2)
        cell = Cell("three groups", T=2, k=2, E=2, L=96, I=32)
        check_cell(experts_grouped_e4m3, cell, "triton", dtype=torch.float32)

    def test_replay(self):
        check_replay(experts_grouped_e4m3, SMALL[1], "triton")

    def test_raises_small_scales(self):
        arguments = draw(experts_grouped_e4m3, SMALL[0], dtype=torch.float32)
        arguments["w13_scale"][:, :, 1] = 124 - SPAN - 3
        arguments["w2_scale"][:, 5:, :] -= 10
        kernel = experts_grouped_e4m3.implementation("triton")
        ours = packed_arguments(experts_grouped_e4m3, kernel, arguments, torch.float32)
        expected = experts_grouped_e4m3(**arguments)
        torch.testing.assert_close(kernel.run(**ours), expected, rtol=0, atol=0.01)


def columns(elements, four):
    """The last axis in the order of a product's columns, written out."""
    group = elements.unflatten(-1, (-1, 32))
    if four:
        at = [8 * q + h + (4, 2, 0, 6)[b] for h in (0, 1) for q in range(4) for b in range(4)]
    else:
        at = [
            8 * q + 4 * h + 2 * c + b
            for h in (0, 1) for c in (0, 1) for q in range(4) for b in (0, 1)
        ]  # fmt: skip
    return group[..., at].flatten(-2)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
@pytest.mark.parametrize("four", [True, False])
def test_rows_in_e4m3_are_mxfp8_of_one_block(four):
    from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3

    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    x[1], x[2, 7], x[3] = 0, 1e4, x[3] * 1e-3
    codes, scales = rows_in_e4m3(x, four=four)
    expected, byte = mxfp8.quantize(x, block=96)
    assert torch.equal(scales, torch.where(byte[:, 0] == 0, 0, 2.0 ** (byte[:, 0].float() - 127)))
    assert torch.equal(codes.float(), columns(expected.float(), four))
    assert not torch.equal(codes.float(), columns(expected.float(), not four))


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["situ", "silu"])
def test_rows_in_e4m3_activate_what_a_product_has_not(name, dtype):
    from tercel.ops._lib.kernel_activation import Activation
    from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3

    bounds = (4.0, 25.0) if name == "situ" else (None, None)
    both = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    taking_turns = both.unflatten(1, (2, -1, 8)).transpose(1, 2).flatten(1)
    codes, scales = rows_in_e4m3(taking_turns, four=True, activation=Activation(name, *bounds))
    expected, expected_scales = rows_in_e4m3(activation_of(name, *bounds)(both), four=True)
    assert torch.equal(scales, expected_scales)
    unequal = codes.float() != expected.float()
    assert float(unequal.float().mean()) < 0.01
    wrong, _ = rows_in_e4m3(both, four=True, activation=Activation(name, *bounds))
    assert float((wrong.float() != expected.float()).float().mean()) > 0.5
