"""MXFP4: E2M1 codes in blocks of 32 along a row, with one power of two per block.

A scale byte s means 2 ** (s - 127), and 255 is not a number.
Source: OCP Microscaling formats v1.0; compressed-tensors `mxfp4-pack-quantized`.
"""

import torch

from tercel.core import e2m1
from tercel.errors import ContractError

BLOCK = 32
"""Consecutive values of a row that share a scale."""

BIAS = 127
"""Of the exponent in a scale byte."""

VALUE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Those that hold every value below 2 ** 128."""


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The exact values [..., K] of codes [..., K / 2] u8 and scale [..., K / 32] u8.

    Args:
        dtype: bf16, fp32 or fp64. Products from 2 ** 128 on are infinite in bf16 and fp32.
    """
    if dtype not in VALUE_DTYPES:
        raise ContractError(f"mxfp4: {dtype} does not hold every value; use bfloat16 or float32")
    blocks = e2m1.decode(codes, dtype).view(*scale.shape, BLOCK)
    return blocks.mul_(_powers_of_two(scale, dtype)[..., None]).flatten(-2)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K / 2] u8 and scales [..., K / 32] u8 of w [..., K], K a multiple of 32.

    A block's scale is the smallest that leaves no magnitude above 6, so that none saturates; a
    block of zeros gets the scale 1. Values are rounded to the nearest code, ties to the even one.
    What MXFP4 holds comes back as it was.

    Raises:
        ContractError: K is not a multiple of 32, or a value is not finite.
    """
    if w.shape[-1] % BLOCK:
        raise ContractError(f"mxfp4: a row of {w.shape[-1]} values is not a multiple of {BLOCK}")
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK)
    if w.dtype != torch.float64:
        blocks = blocks.float()
    if not bool(blocks.isfinite().all()):
        raise ContractError("mxfp4: the weights hold values that are not finite")
    # largest = mantissa * 2 ** exponent with a mantissa in [0.5, 1), and 6 = 0.75 * 2 ** 3.
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))
    exponent = torch.where(mantissa == 0, 0, exponent - 3 + (mantissa > 0.75).int())
    exponent = exponent.clamp(-BIAS, BIAS)
    codes = e2m1.encode(torch.ldexp(blocks, -exponent[..., None])).flatten(-2)
    return codes, (exponent + BIAS).to(torch.uint8)


def _powers_of_two(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2 ** (scale - 127), built from the bits of fp32: a library's power may be off by an ulp."""
    exponent = scale.to(torch.int32)
    bits = exponent << 23
    bits = torch.where(exponent == 0, 1 << 22, bits)  # 2 ** -127 is subnormal
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.view(torch.float32).to(dtype)
