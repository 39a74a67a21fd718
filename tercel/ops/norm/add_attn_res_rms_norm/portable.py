"""Add, selection, norm, in few torch calls: this op runs twice per layer."""

import torch

from tercel.ops._lib.norm import attn_res, rms_norm


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
    mixture = attn_res(bank, updated, res_norm, res_proj, res_eps)
    return rms_norm(mixture, weight, eps), updated, mixture
