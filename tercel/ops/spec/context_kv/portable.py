"""One product for all layers, and one write for each."""

import torch

from tercel.ops._lib.pools import store_rows
from tercel.ops._lib.rope import norm_rotate


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
    layers, _, _, _, kv_heads, dim = pages.shape
    kv = torch.nn.functional.linear(x, weight).view(-1, layers, 2, kv_heads, dim)
    keys = norm_rotate(
        kv[:, :, 0],
        k_norm.unsqueeze(1),
        positions,
        inv_freq,
        eps=eps,
        scale=rope_scale,
        interleaved=interleaved,
    )
    kv[:, :, 0] = keys
    rows = kv.view(x.shape[0], layers, -1).transpose(0, 1).contiguous()
    for layer in range(layers):
        store_rows(pages[layer].flatten(0, 1).flatten(1), slot_mapping, rows[layer])
