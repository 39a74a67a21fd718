"""E2M1: 4-bit floating point, two codes to a byte, the earlier value in the low nibble.

A code is a sign bit over three bits of magnitude. MXFP4 and NVFP4 differ in their scales only.
Source: OCP Microscaling formats v1.0.
"""

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of a code's low three bits."""

_PAIR = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}
"""A dtype of the size of two values."""


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [..., K] of codes [..., K / 2] u8, in bf16, fp32 or fp64."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], -1)
    # Both values of a byte are fetched as one element: several times faster on a CPU.
    table = pairs.view(_PAIR[dtype]).flatten().to(codes.device)
    flat = table.index_select(0, codes.flatten().int()).view(dtype)
    return flat.view(*codes.shape[:-1], 2 * codes.shape[-1])


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest codes [..., K / 2] u8 of values [..., K] fp32 or fp64, ties to the even code.

    Magnitudes above 6 become 6.
    """
    code = torch.bucketize(values.abs(), _boundaries(values)).to(torch.uint8)
    code |= values.signbit().to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


def _boundaries(like: torch.Tensor) -> torch.Tensor:
    """Midpoints between neighbouring magnitudes; a value above the i-th gets at least code i + 1.

    The midpoint below an even code is moved down by one ulp, so that a tie goes to that code.
    """
    grid = torch.tensor(MAGNITUDES, dtype=like.dtype)
    middle = (grid[1:] + grid[:-1]) / 2
    below = torch.nextafter(middle, torch.zeros_like(middle))
    odd = torch.arange(len(middle)) % 2 == 1
    return torch.where(odd, below, middle).to(like.device)
