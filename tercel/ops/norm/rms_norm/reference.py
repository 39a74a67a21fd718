"""RMSNorm in the dtype of its input, sums in at least fp32."""

import torch

from tercel.ops._lib.dtypes import wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    rows = wide(x)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
