"""norm/attn_res by a cluster of blocks per token, where rows are few and long.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch

from tercel.ops._lib.kernel_selection_cluster import selection


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
