"""Selection, then norm, in few torch calls."""

import torch

from tercel.ops._lib.norm import attn_res, rms_norm


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
    mixture = attn_res(bank, prefix, res_norm, res_proj, res_eps)
    return rms_norm(mixture, weight, eps), mixture
