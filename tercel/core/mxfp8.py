"""MXFP8: e4m3 values in blocks of 32 along a row, with one power of two per block, rounded up.

A block's exponent is ceil(log2(largest / 448)), so that no value saturates; a scale byte s means
2 ** (s - 127). A block of zeros has the byte 0.
Source: OCP Microscaling formats v1.0, with the scale rounded up as TensorRT-LLM's MXFP8 does on
Blackwell Ultra.
"""

import torch

BLOCK = 32
"""Consecutive values of a row that share a scale."""

BIAS = 127
"""Of the exponent in a scale byte."""


def quantize(x: torch.Tensor, *, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] e4m3 and scales [..., K / block] u8 of x [..., K], ties to the even code.

    A block with a value that is not finite has the byte 0 and codes that are not numbers.
    """
    blocks = torch.unflatten(x.detach(), -1, (-1, block))
    largest = blocks.abs().amax(-1)
    exponent = _exponents(largest)
    scaled = torch.ldexp(blocks, -exponent[..., None])
    scaled = scaled.masked_fill(~largest.isfinite()[..., None], torch.nan)
    codes = scaled.flatten(-2).float().to(torch.float8_e4m3fn)
    return codes, (exponent + BIAS).to(torch.uint8)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The exact values [..., K] in bf16, fp32 or fp64."""
    exponent = scale.int() - BIAS
    blocks = torch.unflatten(codes.to(dtype), -1, (scale.shape[-1], -1))
    return torch.ldexp(blocks, exponent[..., None]).flatten(-2)


def rounded(x: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """x as MXFP8, or blocks of another size, hold it; in its own dtype."""
    return dequantize(*quantize(x, block=block), x.dtype)


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    # largest = mantissa * 2 ** exponent with a mantissa in [0.5, 1), and 448 = 0.875 * 2 ** 9.
    mantissa, exponent = torch.frexp(largest.float() if largest.itemsize < 4 else largest)
    exponent = torch.where(mantissa > 0.875, exponent - 8, exponent - 9)
    is_number = largest.isfinite() & (largest > 0)
    return torch.where(is_number, exponent, -BIAS).clamp(-BIAS, BIAS)
