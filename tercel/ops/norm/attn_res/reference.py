"""The selection, written as its formula."""

import torch

from tercel.ops._lib.dtypes import wide


def attn_res(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    rows = wide(torch.cat([bank, prefix.unsqueeze(0)]))
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    scores = (normed * (wide(res_norm) * wide(res_proj))).sum(-1, keepdim=True)
    return (torch.softmax(scores, dim=0) * rows).sum(0).to(prefix.dtype)
