"""Selection, then norm."""

import torch

from tercel.ops.norm.attn_res.reference import attn_res
from tercel.ops.norm.rms_norm.reference import rms_norm


def attn_res_rms_norm(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    *,
    res_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    mixture = attn_res(bank, prefix, res_norm, res_proj, eps=res_eps)
    return rms_norm(mixture, weight, eps=eps), mixture
