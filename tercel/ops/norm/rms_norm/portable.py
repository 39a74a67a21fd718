"""RMSNorm on the fused function of torch."""

import torch

from tercel.ops._lib import norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return norm.rms_norm(x, weight, eps)
