"""norm/attn_res_rms_norm by a cluster of blocks per token, where rows are few and long.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch

from tercel.ops._lib.kernel_selection_cluster import selection


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
    weights = (res_norm, res_proj, weight)
    normed, _, mixture = selection(prefix, None, bank, weights, (res_eps, eps))
    assert normed is not None
    return normed, mixture
