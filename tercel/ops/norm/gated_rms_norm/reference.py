"""The gated norm, written as its formula."""

import torch

from tercel.ops._lib.dtypes import wide


def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    rows = wide(o)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * torch.sigmoid(wide(gate))).to(o.dtype)
