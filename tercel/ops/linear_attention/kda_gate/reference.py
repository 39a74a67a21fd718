"""Log decays in the dtype of dt_bias."""

import torch
import torch.nn.functional as F


def kda_gate(
    f: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    rate = A_log.exp().unsqueeze(-1)
    a = (f + dt_bias).view(f.shape[0], A_log.shape[0], -1)
    if lower_bound is None:
        return F.softplus(a).mul_(-rate)
    return a.mul_(rate).sigmoid_().mul_(lower_bound)
