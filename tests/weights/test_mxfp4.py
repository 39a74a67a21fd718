import pytest
import torch

from tercel.core import e2m1, mxfp4
from tercel.errors import ContractError

CODES = torch.arange(16, dtype=torch.uint8)


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """One block per scale 0..254, each with every code twice."""
    codes = torch.cat([CODES, CODES])
    packed = (codes[::2] | codes[1::2] << 4).expand(255, 16).contiguous()
    return packed, torch.arange(255, dtype=torch.uint8)[:, None]


def expected() -> torch.Tensor:
    magnitudes = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    row = [*magnitudes, *(-value for value in magnitudes)] * 2
    rows = [[value * 2.0 ** (scale - 127) for value in row] for scale in range(255)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_code_and_scale_is_exact(dtype):
    got = mxfp4.dequantize(*every_code_and_scale(), dtype)
    want = expected().to(dtype)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())  # code 8 is minus zero


def test_scale_255_is_not_a_number():
    codes, scale = every_code_and_scale()
    assert mxfp4.dequantize(codes[:1], scale[:1] + 255, torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_representable_values_come_back(dtype):
    want = mxfp4.dequantize(*every_code_and_scale(), dtype)
    want = want[want.isfinite().all(-1)]
    got = mxfp4.dequantize(*mxfp4.quantize(want), dtype)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("largest", [0.5, 1, 1.5, 2, 3, 4, 6])
def test_representable_blocks_with_a_smaller_largest_value_come_back(largest):
    values = [value for value in e2m1.MAGNITUDES if value <= largest]
    block = torch.tensor((values * 32)[:32])
    block[0] = largest
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(block), torch.float32), block)


def test_rounds_to_nearest_with_ties_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    above = [value * (1 + 2**-20) for value in ties]
    below = [value * (1 - 2**-20) for value in ties]
    block = torch.zeros(32)
    block[:21] = torch.tensor([*ties, *above, *below])
    block[21] = 6.0
    got = mxfp4.dequantize(*mxfp4.quantize(block), torch.float32)[:21].tolist()
    up, down = e2m1.MAGNITUDES[1:], e2m1.MAGNITUDES[:-1]
    assert got == [0, 1, 1, 2, 2, 4, 4, *up, *down]


@pytest.mark.parametrize(("largest", "scale"), [(6.0, 127), (6.001, 128), (3.0, 126), (3.1, 127)])
def test_scale_is_the_smallest_without_saturation(largest, scale):
    assert mxfp4.quantize(torch.full((32,), -largest))[1].item() == scale


def test_zeros_get_scale_one():
    codes, scale = mxfp4.quantize(torch.zeros(2, 64))
    assert codes.shape == (2, 32) and not codes.any()
    assert scale.tolist() == [[127, 127], [127, 127]]


def test_refusals():
    with pytest.raises(ContractError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(33))
    with pytest.raises(ContractError, match="finite"):
        mxfp4.quantize(torch.full((32,), torch.inf))
    with pytest.raises(ContractError, match="float16"):
        mxfp4.dequantize(*every_code_and_scale(), torch.float16)
