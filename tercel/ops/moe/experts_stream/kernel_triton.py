"""The kernels of tercel/ops/_lib/kernel_experts.py at one and two tokens."""

import torch

from tercel.ops._lib.kernel_experts import Activation, Slots, few_tokens


def experts_stream(
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
    return few_tokens(
        z,
        Slots(ids, weights, first_expert),
        (w13, w13_scale, w2, w2_scale),
        Activation(activation, beta, linear_beta),
    )
