"""The routed experts, whatever the number of tokens."""

import torch

from tercel.ops.moe.experts_grouped.reference import experts_grouped


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
    return experts_grouped(
        z,
        ids,
        weights,
        w13,
        w13_scale,
        w2,
        w2_scale,
        w13_scale_2,
        w2_scale_2,
        first_expert=first_expert,
        activation=activation,
        beta=beta,
        linear_beta=linear_beta,
    )
