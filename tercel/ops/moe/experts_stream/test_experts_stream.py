import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
)
from tercel.contract.draw import draw
from tercel.ops.moe.experts_stream import CONTRACT, experts_stream
from tests.interpreter import INTERPRETED, REASON

ONE, TWO, SAME, WIDE, PLAIN = CONTRACT.cells
REFERENCE = "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(experts_stream, cell, REFERENCE, dtype=dtype)


def test_meta():
    check_meta(experts_stream, ONE, REFERENCE)


def test_replay():
    check_replay(experts_stream, TWO, REFERENCE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update({n: a[n].repeat(2, 1) for n in ("z", "ids", "weights")}),
        lambda a: a.update({n: a[n].repeat(1, 5) for n in ("ids", "weights")}),
        lambda a: a.update(w2=a["w2"].float()),
    ],
    ids=["four tokens", "20 experts", "only w13 quantized"],
)
def test_refuses(change):
    check_refusal(experts_stream, TWO, REFERENCE, change)


def test_two_tokens_of_wide_experts_are_refused():
    def two(a):
        a.update({n: a[n].repeat(2, 1) for n in ("z", "ids", "weights")})

    error = check_refusal(experts_stream, WIDE, REFERENCE, two)
    assert "I <= 256" in str(error)


def test_expert_twice_in_a_row_is_invalid():
    check_invalid(experts_stream, SAME, lambda a: a["ids"][0].fill_(3))


def test_control_swaps_the_tokens():
    def broken(z, **rest):
        return experts_stream(z=z.flip(0), **rest)

    check_control(experts_stream, TWO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Interpreted: all but the tensor-core branch; experts_decode's test says more."""

    def test_two_plain_tokens(self):
        check_cell(experts_stream, PLAIN, "triton", dtype=torch.bfloat16)

    def test_a_token_alone_is_the_same(self):
        arguments = draw(experts_stream, PLAIN, dtype=torch.bfloat16)
        run = experts_stream.using("triton")
        both = run(**arguments)
        alone = {n: arguments[n][1:].clone() for n in ("z", "ids", "weights")}
        assert torch.equal(run(**{**arguments, **alone})[0], both[1])
