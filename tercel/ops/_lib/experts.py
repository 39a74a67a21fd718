"""What the plain-torch experts share; E experts of this rank, I their width, L their input."""

import torch

from tercel.core import mxfp4, nvfp4
from tercel.ops._lib.dtypes import wide

Weights = tuple[torch.Tensor, None, torch.Tensor, None, None, None]


def pack(
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Weights:
    """The six weight arguments with MXFP4 and NVFP4 turned into their values in `dtype`, once."""
    return (
        dequantized(w13, w13_scale, w13_scale_2, dtype),
        None,
        dequantized(w2, w2_scale, w2_scale_2, dtype),
        None,
        None,
        None,
    )


def dequantized(
    w: torch.Tensor,
    scale: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The values of stacked experts: as they are, MXFP4, or NVFP4 where there is a scale_2."""
    if scale is None:
        return w
    if scale_2 is None:
        return mxfp4.dequantize(w, scale, dtype)
    return nvfp4.dequantize(w, scale, scale_2, dtype)


def local_experts(
    ids: torch.Tensor, weights: torch.Tensor, first_expert: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices into this rank's experts, weights that are zero where the expert is elsewhere)."""
    local = ids - first_expert if first_expert else ids
    index = local.clamp(0, num_experts - 1)
    return index, weights.masked_fill(index != local, 0.0)


def combine(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """act(sum over slots of weights [T, k] * outputs [T, k, L]), fp32 inside."""
    total = torch.bmm(weights.unsqueeze(1), wide(outputs))
    return total.squeeze(1).to(outputs.dtype)
