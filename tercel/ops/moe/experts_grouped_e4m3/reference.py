"""As experts_grouped's, with rows rounded to e4m3 before each product."""

import torch

from tercel.core import mxfp4, mxfp8
from tercel.ops.moe.experts_grouped import reference as exact

SPAN = 11
"""Binades of scales that a row keeps."""


def experts_grouped_e4m3(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    activate = exact.activation_of(activation, beta, linear_beta)
    return exact.weighted_sum(
        _in_e4m3(z),
        ids,
        weights,
        mxfp4.dequantize(w13, _raised(w13_scale), z.dtype),
        mxfp4.dequantize(w2, _raised(w2_scale), z.dtype),
        first_expert,
        lambda hidden: _in_e4m3(activate(hidden)),
    )


def _raised(scale: torch.Tensor) -> torch.Tensor:
    least = scale.int().amax(-1, keepdim=True) - SPAN
    return torch.maximum(scale.int(), least).to(torch.uint8)


def _in_e4m3(rows: torch.Tensor) -> torch.Tensor:
    """Rows as e4m3 times one power of two a row holds them."""
    return mxfp8.rounded(rows, block=rows.shape[-1])
