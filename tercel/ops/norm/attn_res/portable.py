"""The selection in few torch calls."""

import torch

from tercel.ops._lib import norm


def attn_res(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    return norm.attn_res(bank, prefix, res_norm, res_proj, eps)
