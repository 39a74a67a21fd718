"""Add, then norm, on torch's fused norm."""

import torch

from tercel.ops._lib.norm import rms_norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    updated = residual + x
    return rms_norm(updated, weight, eps), updated
