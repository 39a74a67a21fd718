"""norm/attn_res, in one launch or two."""

import torch

from tercel.ops._lib.kernel_selection import selection


def attn_res(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    _, _, mixture = selection(prefix, None, bank, (res_norm, res_proj, None), (eps, 0.0))
    return mixture
