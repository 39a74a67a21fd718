import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.draw import Maker
from tercel.ops.linear_attention.causal_conv1d import CONTRACT, causal_conv1d
from tercel.ops.linear_attention.causal_conv1d.reference import causal_conv1d as naive
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(causal_conv1d, cell, causal_conv1d.portable.name, dtype=dtype)


def test_sequence():
    check_sequence(causal_conv1d, CELL, causal_conv1d.portable.name, steps=3)


def test_replay():
    check_replay(causal_conv1d, CELL, causal_conv1d.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(state=a["state"][:, :2].contiguous()), "S >= W - 1"),
        (lambda a: a.update(fresh=a["fresh"][1:]), "fresh"),
        (lambda a: a.update(cu_seqlens=(*a["cu_seqlens"][:-1], 99)), "cu_seqlens"),
        (lambda a: a.update(weight=a["weight"].bfloat16()), "weight"),
        (lambda a: a.update(slots=a["slots"].int()), "slots"),
        (lambda a: a.update(state=a["state"].transpose(1, 2).contiguous()), "axis"),
    ],
    ids=["window too short", "fresh", "bounds", "bf16 weight", "int32 slots", "channels first"],
)
def test_refuses(change, words):
    error = check_refusal(causal_conv1d, CELL, causal_conv1d.portable.name, change)
    assert words in str(error)


@pytest.mark.parametrize("split", range(8))
def test_a_split_anywhere_changes_nothing(split):
    """Chunks shorter than the window included."""
    make = Maker(1, torch.float32)
    x, weight = make.normal(7, 12), make.normal(12, 4, dtype="f32")
    slots = torch.tensor([1])
    whole, parts = make.poison(3, 3, 12), make.poison(3, 3, 12)
    expected = causal_conv1d(x, weight, whole, slots, cu_seqlens=(0, 7), fresh=(True,))
    first = causal_conv1d(x[:split], weight, parts, slots, cu_seqlens=(0, split), fresh=(True,))
    rest = causal_conv1d(x[split:], weight, parts, slots, cu_seqlens=(0, 7 - split), fresh=(False,))
    torch.testing.assert_close(torch.cat((first, rest)), expected)
    assert torch.equal(parts[1], whole[1])


def test_control_taps_reversed():
    def broken(x, weight, state, slots, **lengths):
        return naive(x, weight.flip(1), state, slots, **lengths)

    check_control(causal_conv1d, CELL, broken)


def test_control_window_of_convolved_rows():
    def broken(x, weight, state, slots, **lengths):
        y = naive(x, weight, state, slots, **lengths)
        state[slots[0], :3] = y[2:5]
        return y

    check_control(causal_conv1d, CELL, broken)


def test_control_slot_of_another_row():
    def broken(x, weight, state, slots, **lengths):
        return naive(x, weight, state, slots.roll(2), **lengths)

    check_control(causal_conv1d, CELL, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    CELL = Cell("ragged", C=300, W=4, S=4, SLOTS=9, cu_seqlens=(0, 1, 3, 41, 41, 41, 109))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_cells(self, dtype):
        check_cell(causal_conv1d, self.CELL, "triton", dtype=dtype)

    def test_sequence(self):
        check_sequence(causal_conv1d, self.CELL, "triton", steps=2)

    def test_replay(self):
        check_replay(causal_conv1d, self.CELL, "triton")

    def test_control_window_of_the_wrong_slot(self):
        def broken(x, weight, state, slots, **lengths):
            return causal_conv1d.using("triton")(x, weight, state, slots.roll(1), **lengths)

        check_control(causal_conv1d, self.CELL, broken)
