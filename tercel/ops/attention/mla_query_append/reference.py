"""Query projection, absorption of the key projection, and the append."""

import torch
import torch.nn.functional as F

from tercel.ops.attention.mla_append.reference import mla_append
from tercel.ops.norm.rms_norm.reference import rms_norm


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
    mla_append(latent, kv_norm, pages, slot_mapping, eps=eps, page_scale=page_scale)
    if q_norm is not None and q_b is not None:
        q = F.linear(rms_norm(q, q_norm, eps=q_eps), q_b)
    heads, k_dim, _ = w_k.shape
    q = q.view(q.shape[0], heads, -1)
    absorbed = torch.bmm(q[:, :, :k_dim].transpose(0, 1), w_k).transpose(0, 1)
    return torch.cat((absorbed, q[:, :, k_dim:]), -1)
