"""Add, then norm."""

import torch

from tercel.ops.norm.rms_norm.reference import rms_norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    updated = residual + x
    return rms_norm(updated, weight, eps=eps), updated
