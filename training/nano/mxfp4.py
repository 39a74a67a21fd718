"""MXFP4 as the checkpoint stores it, and the same rounding inside the training loop.

Every 32 consecutive inputs of a row share a power-of-two scale (e8m0), the smallest that leaves
none of them above 6, the largest e2m1 value. Source: OCP Microscaling formats v1.0.
"""

from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
LARGEST = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., in] -> packed uint8 [..., in / 2] and scale uint8 [..., in / 32]."""
    scaled, exponent = _scale(weight)
    code = _nearest_magnitude(scaled.abs()) + 8 * (scaled < 0)
    low, high = code.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, (exponent + 127).to(torch.uint8).squeeze(-1)


def fake_quantize(weight: Tensor) -> Tensor:
    """The value that `quantize` stores, with the gradient of the identity (straight-through)."""
    with torch.no_grad():
        scaled, exponent = _scale(weight)
        magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
        rounded = magnitudes[_nearest_magnitude(scaled.abs())].copysign(scaled)
        stored = (rounded * torch.exp2(exponent)).flatten(-2)
    return weight + (stored - weight).detach()


def _scale(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks divided by their scales [..., in / 32, 32], and the scales' exponents."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(largest / LARGEST)).clamp(-127, 127)
    return blocks * torch.exp2(-exponent), exponent


def _nearest_magnitude(value: Tensor) -> Tensor:
    """Index into MAGNITUDES of the nearest one; a tie goes to the even code."""
    codes = torch.zeros_like(value, dtype=torch.int32)
    for code, (low, high) in enumerate(pairwise(MAGNITUDES)):
        middle = (low + high) / 2
        codes += (value > middle) if code % 2 == 0 else (value >= middle)
    return codes
