"""Add, selection, norm."""

import torch

from tercel.ops.norm.attn_res.reference import attn_res
from tercel.ops.norm.rms_norm.reference import rms_norm


def add_attn_res_rms_norm(
    x: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    *,
    res_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    updated = x if prefix is None else prefix + x
    mixture = attn_res(bank, updated, res_norm, res_proj, eps=res_eps)
    return rms_norm(mixture, weight, eps=eps), updated, mixture
