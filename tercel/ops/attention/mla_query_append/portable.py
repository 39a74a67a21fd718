"""The layered form with the products and norms of few rows."""

import torch

from tercel.ops._lib.gemm import matmul
from tercel.ops._lib.latent import stored
from tercel.ops._lib.norm import rms_norm
from tercel.ops._lib.pools import store_rows


def mla_query_append(
    q: torch.Tensor,
    q_norm: torch.Tensor | None,
    q_b: torch.Tensor | None,
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    w_k: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_eps: float,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, k_dim, rank = w_k.shape
    normed = rms_norm(latent[:, :rank], kv_norm, eps)
    entries = stored(torch.cat((normed, latent[:, rank:]), -1), pages, page_scale)
    store_rows(pages.flatten(0, 1), slot_mapping, entries)
    if q_norm is not None and q_b is not None:
        q = matmul(rms_norm(q, q_norm, q_eps), q_b)
    q = q.view(q.shape[0], heads, -1)
    absorbed = torch.bmm(q[:, :, :k_dim].transpose(0, 1), w_k).transpose(0, 1)
    return torch.cat((absorbed, q[:, :, k_dim:]), -1)
