"""Layer by layer."""

import torch

from tercel.ops.attention.qk_norm_rope.reference import normalize, rotate


def context_kv(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
    counters: torch.Tensor | None = None,
) -> None:
    for layer, rows in enumerate(weight.chunk(pages.shape[0])):
        kv = (x @ rows.T).view(x.shape[0], *pages.shape[3:])
        work = torch.promote_types(x.dtype, torch.float32)
        k = normalize(kv[:, 0].to(work), k_norm[layer], eps)
        k = rotate(k, positions, inv_freq, scale=rope_scale, interleaved=interleaved)
        pages[layer].flatten(0, 1)[slot_mapping] = torch.stack((k.to(x.dtype), kv[:, 1]), 1)
