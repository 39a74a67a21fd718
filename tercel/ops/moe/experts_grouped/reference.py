"""Slot by slot: gather the expert of every token, run it, weigh, add."""

from collections.abc import Callable
from functools import partial

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
    activate = activation_of(activation, beta, linear_beta)
    return weighted_sum(z, ids, weights, w13, w2, first_expert, activate)


def activation_of(
    name: str, beta: float | None, linear_beta: float | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "silu":
        return silu_mul
    assert beta is not None
    return partial(situ_mul, beta=beta, linear_beta=linear_beta)


def weighted_sum(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    first_expert: int,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Of the experts' outputs; `activate` gives what w2 multiplies."""
    total = torch.zeros_like(wide(z))
    for slot in range(ids.shape[1]):
        local = ids[:, slot] - first_expert
        here = (local >= 0) & (local < len(w13))
        expert = local.where(here, 0)
        activated = activate(_product(w13[expert], z))
        output = wide(_product(w2[expert], activated)) * weights[:, slot, None]
        total += output.where(here[:, None], 0)
    return total.to(z.dtype)


def _product(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """act(matrices [T, M, K] @ rows [T, K])."""
    return (wide(matrices) @ wide(rows)[:, :, None])[:, :, 0].to(rows.dtype)
