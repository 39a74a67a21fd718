"""The gated norm on torch's fused norm."""

import torch

from tercel.ops._lib.dtypes import wide


def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    normed = torch.rms_norm(wide(o), weight.shape, weight, eps).view(gate.shape)
    return normed.mul_(torch.sigmoid(wide(gate))).to(o.dtype)
