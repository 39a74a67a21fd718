"""The kernels of tercel/ops/_lib/kernel_experts.py with rows in MXFP8."""

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_experts import Rows, Slots, few_tokens


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
    return few_tokens(
        Rows(codes, scale, "mxfp8"),
        Slots(ids, weights, first_expert),
        (w13, w13_scale, w2, w2_scale),
        Activation(activation, beta, linear_beta),
        ids_early=ids_early,
    )
