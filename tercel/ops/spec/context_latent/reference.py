"""One product for all layers, then layer by layer."""

import torch

from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.pools import store_rows
from tercel.ops._lib.rope import rotate
from tercel.ops.norm.rms_norm.reference import rms_norm


def context_latent(
    x: torch.Tensor,
    weight: torch.Tensor,
    kv_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> None:
    layers, _, _, entry = pages.shape
    rank = kv_norm.shape[1]
    rows = torch.nn.functional.linear(x, weight).view(-1, layers, entry)
    turned = rotate(
        wide(rows[..., rank:]), positions, inv_freq, scale=rope_scale, interleaved=interleaved
    )
    for layer in range(layers):
        normed = rms_norm(rows[:, layer, :rank], kv_norm[layer], eps=eps)
        entries = torch.cat((normed, turned[:, layer].to(x.dtype)), -1)
        store_rows(pages[layer].flatten(0, 1), slot_mapping, entries)
