"""Query projection, absorption of the key projection, and the turned parts."""

import torch
import torch.nn.functional as F

from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.rope import rotate
from tercel.ops.norm.rms_norm.reference import rms_norm


def mla_query_rope(
    q: torch.Tensor,
    q_norm: torch.Tensor,
    q_b: torch.Tensor,
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    w_k: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, k_dim, rank = w_k.shape
    projected = F.linear(rms_norm(q, q_norm, eps=eps), q_b).view(q.shape[0], heads, -1)
    absorbed = torch.bmm(projected[:, :, :k_dim].transpose(0, 1), w_k).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        rows = rotate(wide(x), positions, inv_freq, scale=rope_scale, interleaved=interleaved)
        return rows.to(x.dtype)

    query = torch.cat((absorbed, turned(projected[:, :, k_dim:])), -1)
    normed = rms_norm(latent[:, :rank], kv_norm, eps=eps)
    return query, torch.cat((normed, turned(latent[:, rank:])), -1)
