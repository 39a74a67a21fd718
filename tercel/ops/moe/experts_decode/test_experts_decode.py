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
)
from tercel.contract.draw import draw
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_decode import CONTRACT, experts_decode
from tests.interpreter import INTERPRETED, REASON

ONE, BATCH = CONTRACT.cells[:2]
PORTABLE = experts_decode.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(experts_decode, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", [ONE, BATCH], ids=str)
def test_roundings(cell):
    check_roundings(experts_decode, cell, PORTABLE)


@pytest.mark.parametrize("cell", [ONE, BATCH], ids=str)
def test_meta(cell):
    check_meta(experts_decode, cell, PORTABLE)


@pytest.mark.parametrize("cell", [ONE, BATCH], ids=str)
def test_replay(cell):
    check_replay(experts_decode, cell, PORTABLE)


def test_a_row_of_nan_disturbs_no_other():
    arguments = draw(experts_decode, BATCH, dtype=torch.float32)
    expected = experts_decode(**arguments)
    arguments["z"][3] = float("nan")
    actual = experts_decode(**arguments)
    assert actual[3].isnan().all()
    assert torch.equal(actual[4:], expected[4:]) and torch.equal(actual[:3], expected[:3])


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update({n: a[n].repeat(9, 1) for n in ("z", "ids", "weights")}),
        lambda a: a.update(w2=a["w2"].float()),
        lambda a: a.update(first_expert=None),
        lambda a: a.update(weights=a["weights"][:, :-1].contiguous()),
        lambda a: a.update({n: a[n].repeat(1, 5) for n in ("ids", "weights")}),
    ],
    ids=["72 tokens", "only w13 quantized", "no first expert", "a weight less", "20 experts"],
)
def test_refuses(change):
    check_refusal(experts_decode, BATCH, PORTABLE, change)


def test_expert_twice_in_a_row_is_invalid():
    check_invalid(experts_decode, BATCH, lambda a: a["ids"][0].fill_(3))


def test_control_gate_and_up_swapped():
    def broken(w13, w13_scale, **rest):
        half = w13.shape[1] // 2
        swapped = {"w13": w13.roll(half, 1), "w13_scale": w13_scale.roll(half, 1)}
        return experts_decode(**rest, **swapped)

    check_control(experts_decode, BATCH, broken)


SMALL = (
    Cell("one warp a tile, local range", T=2, k=3, E=4, L=64, I=32, total=8, first=2, mxfp4=True),
    Cell("no expert is here", T=1, k=2, E=2, L=32, I=32, total=9, first=9, mxfp4=True),
    Cell("bf16 experts with SiLU", T=2, k=2, E=3, L=32, I=24, activation="silu"),
    Cell("NVFP4", T=1, k=2, E=3, L=32, I=32, nvfp4=True),
)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Interpreted: everything but the tensor-core branch, which only a GPU runs. The sum without
    tensor cores reads the same tiles."""

    @pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.why)
    def test_cells(self, cell):
        check_cell(experts_decode, cell, "triton", dtype=torch.bfloat16)

    def test_two_warps_a_tile_and_padded_groups(self, monkeypatch):
        """As with experts of more than 14 groups, at three."""
        monkeypatch.setattr(expert_tiles, "GROUPS_PER_WARP", 2)
        cell = Cell("three groups", T=1, k=1, E=1, L=32, I=96, mxfp4=True)
        check_cell(experts_decode, cell, "triton", dtype=torch.bfloat16)

    def test_fp32(self):
        check_cell(experts_decode, SMALL[3], "triton", dtype=torch.float32)

    def test_roundings(self):
        check_roundings(experts_decode, SMALL[0], "triton")

    def test_replay(self):
        check_replay(experts_decode, SMALL[2], "triton")

    def test_rows_do_not_depend_on_their_neighbours(self):
        arguments = draw(experts_decode, SMALL[2], dtype=torch.bfloat16)
        run = experts_decode.using("triton")
        before = run(**arguments)
        arguments["z"][1] = 1e30
        arguments["ids"][1] = arguments["ids"][1].flip(0)
        assert torch.equal(run(**arguments)[0], before[0])


def test_control_forgets_a_slot():
    def broken(**arguments):
        arguments["weights"] = arguments["weights"].clone()
        arguments["weights"][:, -1] = 0
        return experts_decode(**arguments)

    check_control(experts_decode, BATCH, broken)
