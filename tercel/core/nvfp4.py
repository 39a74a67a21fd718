"""NVFP4: E2M1 codes in blocks of 16 along a row, an e4m3 scale per block, an fp32 one per matrix.

A value is code * scale * scale_2. Several matrices may be stacked in the rows of one tensor; then
scale_2 has one value for each.
Source: NVIDIA Model Optimizer `NVFP4`, as published in Kimi-K3-NVFP4.
"""

import torch

from tercel.core import e2m1, mxfp4
from tercel.errors import ContractError

BLOCK = 16
"""Consecutive values of a row that share a scale."""

MAX_SCALE = 448.0
"""The largest e4m3 value."""

MIN_EXPONENT, MAX_EXPONENT = -9, 8
"""Powers of two that an e4m3 scale holds: 2 ** -9, its smallest subnormal, to 2 ** 8."""


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The values [..., R, K] of codes [..., R, K / 2] u8.

    code * scale is exact; its product with scale_2 is taken in fp32, or fp64 where `dtype` is, and
    rounded to `dtype`. Where scale_2 is a power of two nothing is rounded.

    Args:
        scale: [..., R, K / 16] e4m3.
        scale_2: [..., P] f32, one for each of P equal parts of the rows.
        dtype: bf16, fp32 or fp64.
    """
    if dtype not in mxfp4.VALUE_DTYPES:
        raise ContractError(f"nvfp4: {dtype} does not hold every code; use bfloat16 or float32")
    values = e2m1.decode(codes, dtype)
    values.view(*scale.shape, BLOCK).mul_(scale.to(dtype)[..., None])
    by_part = values.view(*scale_2.shape, -1, values.shape[-1])
    by_part.mul_(scale_2[..., None, None])
    return values


def quantize(w: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, K / 2] u8 and scales [R, K / 16] e4m3 of w [R, K] fp32 or fp64 under scale_2 [1].

    A block's scale is the e4m3 value nearest to its largest magnitude over 6, and at least 2 ** -9;
    values are rounded to the nearest code and saturate at 6.
    """
    blocks = w.reshape(w.shape[0], -1, BLOCK)
    wanted = blocks.abs().amax(-1) / (6 * scale_2.to(w.dtype))
    scale = wanted.clamp(2.0**MIN_EXPONENT, MAX_SCALE).to(torch.float8_e4m3fn)
    step = scale.to(w.dtype) * scale_2.to(w.dtype)
    return e2m1.encode(blocks / step[..., None]).flatten(-2), scale


def scale_2_of(*matrices: torch.Tensor) -> torch.Tensor:
    """[1] f32: the second scale that lets a shared largest magnitude reach 6 * 448."""
    largest = max(float(w.abs().max()) for w in matrices)
    return torch.tensor([largest / (6 * MAX_SCALE) or 1.0])


def largest_exponent(codes: torch.Tensor, scale: torch.Tensor) -> int | None:
    """The largest exponent of an MXFP4 matrix's blocks that are not all zero; None: all are."""
    used = (codes & 0x77).bool().view(*scale.shape, mxfp4.BLOCK // 2).any(-1)
    return int(scale[used].max()) - mxfp4.BIAS if bool(used.any()) else None


def from_mxfp4(
    codes: torch.Tensor, scale: torch.Tensor, exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [R, K / 16] e4m3 of an MXFP4 matrix under scale_2 = 2 ** exponent.

    A block keeps its codes, and both its halves get the scale 2 ** (k - exponent), k its own
    exponent. Below 2 ** -9, which is 17 below the largest for exponent = largest - 8, they get
    2 ** -9 and the nearest codes, which may lose small values.
    """
    wanted = scale.int() - (mxfp4.BIAS + exponent)
    held = wanted.clamp(MIN_EXPONENT, MAX_EXPONENT)
    outside = wanted != held
    if bool(outside.any()):
        blocks = codes.reshape(*scale.shape, mxfp4.BLOCK // 2).clone()
        values = e2m1.decode(blocks[outside], torch.float32)
        blocks[outside] = e2m1.encode(torch.ldexp(values, (wanted - held)[outside][:, None]))
        codes = blocks.flatten(-2)
    powers = torch.ldexp(torch.ones(held.shape), held).to(torch.float8_e4m3fn)
    return codes, powers.repeat_interleave(mxfp4.BLOCK // BLOCK, dim=-1)


def to_mxfp4(
    codes: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [R, K / 32] u8 of one matrix with scale_2 [1].

    A block whose halves share a power of two keeps its codes, so that what `from_mxfp4` made of
    it inside its window comes back; any other is quantized from its values.
    """
    halves = (scale.double() * scale_2.double()).view(len(scale), -1, mxfp4.BLOCK // BLOCK)
    mantissa, exponent = torch.frexp(halves[..., 0])
    byte = exponent - 1 + mxfp4.BIAS
    kept = (mantissa == 0.5) & (halves[..., 0] == halves[..., 1]) & (byte >= 0) & (byte < 255)
    if bool(kept.all()):
        return codes, byte.to(torch.uint8)
    other_codes, other_scale = mxfp4.quantize(dequantize(codes, scale, scale_2, torch.float64))
    ours, theirs = (x.view(*kept.shape, mxfp4.BLOCK // 2) for x in (codes, other_codes))
    merged = torch.where(kept[..., None], ours, theirs).flatten(-2)
    return merged, torch.where(kept, byte.to(torch.uint8), other_scale)
