import itertools

import pytest
import torch

from tercel.core import e2m1, mxfp4, nvfp4
from tercel.errors import ContractError

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    """An independent reading of the format: sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if byte & 128 else value


def every_code_and_scale():
    """One block of 16 per finite positive scale, with every code once."""
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(127, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).expand(len(scales), 8).contiguous()
    return packed, scales[:, None].view(torch.float8_e4m3fn)


def wanted(scale_2: float) -> torch.Tensor:
    row = [*TABLE, *(-value for value in TABLE)]
    return torch.tensor(
        [[value * e4m3(byte) * scale_2 for value in row] for byte in range(127)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_2", [1.0, 2.0**-20, 2.0**9])
def test_every_code_and_scale_is_exact_under_a_power_of_two(dtype, scale_2):
    got = nvfp4.dequantize(*every_code_and_scale(), torch.tensor([scale_2]), dtype)
    assert got.dtype == dtype and torch.equal(got.double(), wanted(scale_2))
    assert torch.equal(got.signbit(), wanted(scale_2).signbit())


def test_any_second_scale_is_rounded_once_in_fp32():
    scale_2 = torch.tensor([0.0123])
    got = nvfp4.dequantize(*every_code_and_scale(), scale_2, torch.float32)
    assert torch.equal(got, wanted(float(scale_2)).float())
    rounded = nvfp4.dequantize(*every_code_and_scale(), scale_2, torch.bfloat16)
    assert torch.equal(rounded, got.bfloat16())


def test_each_part_of_the_rows_has_its_second_scale():
    codes = torch.full((3, 4, 8), 0x22, dtype=torch.uint8)  # ones
    scale = torch.ones(3, 4, 1).to(torch.float8_e4m3fn)
    scale_2 = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    got = nvfp4.dequantize(codes, scale, scale_2, torch.float32)[..., 0]
    assert got.tolist() == [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]]


def mxfp4_matrix(low: int, high: int, rows=6, blocks=4):
    generator = torch.Generator().manual_seed(low)
    codes = torch.randint(256, (rows, blocks * 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (rows, blocks), generator=generator).to(torch.uint8)
    return codes, scale


@pytest.mark.parametrize("largest", [17, 100, 127, 200, 250])
def test_mxfp4_within_the_window_keeps_codes_and_values(largest):
    codes, scale = mxfp4_matrix(largest - 17, largest + 1)
    scale[0, 0], scale[1, 1] = largest, largest - 17  # both ends of the window
    shared = nvfp4.largest_exponent(codes, scale) - 8
    assert shared == largest - 127 - 8
    kept, blocks = nvfp4.from_mxfp4(codes, scale, shared)
    assert torch.equal(kept, codes)
    assert torch.equal(blocks[:, ::2].float(), blocks[:, 1::2].float())
    scale_2 = torch.tensor([2.0**shared])
    got = nvfp4.dequantize(kept, blocks, scale_2, torch.float64)
    assert torch.equal(got, mxfp4.dequantize(codes, scale, torch.float64))
    again = nvfp4.to_mxfp4(kept, blocks, scale_2)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_below_the_window_the_nearest_codes_are_taken():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0] = 0x7  # 6 in the first block
    codes[0, 16:20] = torch.tensor([0x21, 0x43, 0x65, 0x0F])  # .5 1 1.5 2 3 4 -6 in the second
    scale = torch.tensor([[130, 130 - 18]], dtype=torch.uint8)
    kept, blocks = nvfp4.from_mxfp4(codes, scale, 130 - 127 - 8)
    assert blocks.float().tolist() == [[256, 256, 2**-9, 2**-9]]
    got = e2m1.decode(kept, torch.float32)[0]
    # Halves: .25 is a tie between 0 and .5 and goes to the even code, .75 to 1; the rest is there.
    assert got[32:40].tolist() == [0, 0.5, 1, 1, 1.5, 2, -3, 0]
    assert got[:2].tolist() == [6, 0]


def test_blocks_of_zeros_do_not_widen_the_window():
    codes, scale = mxfp4_matrix(100, 110)
    codes[0, :16] = 0x80  # a positive and a negative zero
    scale[0, 0] = 200
    assert nvfp4.largest_exponent(codes, scale) == int(scale.flatten()[1:].max()) - 127
    kept, blocks = nvfp4.from_mxfp4(codes, scale, -127 + 110 - 8)
    assert blocks.float().isfinite().all() and torch.equal(kept, codes)
    assert nvfp4.largest_exponent(torch.zeros_like(codes), scale) is None


def test_to_mxfp4_quantizes_what_is_not_a_power_of_two():
    codes, scale = mxfp4_matrix(120, 124)
    kept, blocks = nvfp4.from_mxfp4(codes, scale, -12)
    blocks = blocks.float()
    blocks[2, 1] *= 0.75  # one half of one block
    blocks = blocks.to(torch.float8_e4m3fn)
    scale_2 = torch.tensor([2.0**-12])
    got = nvfp4.to_mxfp4(kept, blocks, scale_2)
    values = nvfp4.dequantize(kept, blocks, scale_2, torch.float64)
    direct = mxfp4.dequantize(*mxfp4.quantize(values), torch.float64)
    assert torch.equal(mxfp4.dequantize(*got, torch.float64)[2, :32], direct[2, :32])
    others = [at for at in itertools.product(range(6), range(4)) if at != (2, 0)]
    for row, block in others:
        assert got[1][row, block] == scale[row, block]
        assert torch.equal(got[0][row, 16 * block :][:16], codes[row, 16 * block :][:16])


def test_quantize_is_near_and_keeps_what_nvfp4_holds():
    codes, scale = every_code_and_scale()
    codes, scale = codes[56:], scale[56:]  # normal scales
    scale_2 = torch.tensor([0.5])
    held = nvfp4.dequantize(codes, scale, scale_2, torch.float64)
    got = nvfp4.dequantize(*nvfp4.quantize(held, scale_2), scale_2, torch.float64)
    assert torch.equal(got, held)
    w = torch.randn(16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale_2 = nvfp4.scale_2_of(w)
    assert float(scale_2) == pytest.approx(float(w.abs().max()) / 2688)
    error = nvfp4.dequantize(*nvfp4.quantize(w, scale_2), scale_2, torch.float64) - w
    largest = w.view(16, 4, 16).abs().amax(-1, keepdim=True)
    assert (error.view(16, 4, 16).abs() <= largest / 5).all()


def test_refusals():
    with pytest.raises(ContractError, match="float16"):
        nvfp4.dequantize(*every_code_and_scale(), torch.ones(1), torch.float16)


QUARTER = torch.tensor([0.25])


@pytest.mark.parametrize(
    "misread",
    [
        lambda codes, scale: nvfp4.dequantize(codes << 4 | codes >> 4, scale, QUARTER, DTYPES[1]),
        lambda codes, scale: nvfp4.dequantize(codes, scale, torch.ones(1), DTYPES[1]),
        lambda codes, scale: mxfp4.dequantize(codes, scale.view(torch.uint8)[:, ::2], DTYPES[1]),
    ],
    ids=["nibbles swapped", "scale_2 forgotten", "scales as e8m0 of 32"],
)
def test_control_known_misreadings_are_far_off(misread):
    codes, scale = mxfp4_matrix(120, 130)
    codes, blocks = nvfp4.from_mxfp4(codes, scale, -4)
    right = nvfp4.dequantize(codes, blocks, QUARTER, torch.float32)
    assert float((misread(codes, blocks) - right).norm() / right.norm()) > 0.5
