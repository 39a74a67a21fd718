"""Slot by slot in fp32 or wider: gather the expert of every token, run it, weigh, add."""

import torch

from tercel.core import mxfp4, mxfp8
from tercel.ops.activation.silu_mul.reference import silu_mul
from tercel.ops.activation.situ_mul.reference import situ_mul


def experts_decode_mxfp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    ids_early: bool = False,
) -> torch.Tensor:
    fp64 = codes.dtype == torch.float64
    dtype = torch.float64 if fp64 else torch.float32
    z = mxfp8.dequantize(codes, scale, dtype)
    w13, w2 = mxfp4.dequantize(w13, w13_scale, dtype), mxfp4.dequantize(w2, w2_scale, dtype)
    total = torch.zeros_like(z)
    for slot in range(ids.shape[1]):
        local = ids[:, slot] - first_expert
        here = (local >= 0) & (local < len(w13))
        expert = local.where(here, 0)
        hidden = _product(w13[expert], z)
        if activation == "situ":
            assert beta is not None
            activated = situ_mul(hidden, beta=beta, linear_beta=linear_beta)
        else:
            activated = silu_mul(hidden)
        output = _product(w2[expert], mxfp8.rounded(activated)) * weights[:, slot, None]
        total += output.where(here[:, None], 0)
    return total if fp64 else total.to(torch.bfloat16)


def _product(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """matrices [T, M, K] @ rows [T, K]."""
    return (matrices @ rows[:, :, None])[:, :, 0]
