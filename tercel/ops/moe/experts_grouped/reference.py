"""Slot by slot: gather the expert of every token, run it, weigh, add."""

import torch

from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.experts import dequantized
from tercel.ops.activation.silu_mul.reference import silu_mul
from tercel.ops.activation.situ_mul.reference import situ_mul


def experts_grouped(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    w13 = dequantized(w13, w13_scale, w13_scale_2, z.dtype)
    w2 = dequantized(w2, w2_scale, w2_scale_2, z.dtype)
    total = torch.zeros_like(wide(z))
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
        output = wide(_product(w2[expert], activated)) * weights[:, slot, None]
        total += output.where(here[:, None], 0)
    return total.to(z.dtype)


def _product(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """act(matrices [T, M, K] @ rows [T, K])."""
    return (wide(matrices) @ wide(rows)[:, :, None])[:, :, 0].to(rows.dtype)
