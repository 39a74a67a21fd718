"""attention/mla_query_rope in two launches: ops/_lib/kernel_latent.py."""

import torch

from tercel.ops._lib.kernel_latent import Rotation, Store, absorb, project


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
    entry = torch.empty_like(latent, memory_format=torch.contiguous_format)
    projected = project(q, q_norm, q_b, eps)
    rotation = Rotation(inv_freq, positions, rope_scale, interleaved)
    query = absorb(projected, w_k, Store(latent, kv_norm, eps, entry, None, None), rotation)
    return query, entry
