import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
    draw,
)
from tercel.ops.moe.experts_decode import CONTRACT, experts_decode

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
    ],
    ids=["72 tokens", "only w13 quantized", "no first expert", "a weight less"],
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
