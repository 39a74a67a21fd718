"""The latent's norm and an indexed write."""

import torch

from tercel.ops._lib.latent import stored
from tercel.ops._lib.pools import store_rows
from tercel.ops.norm.rms_norm.reference import rms_norm


def mla_append(
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> None:
    rank = kv_norm.shape[0]
    normed = rms_norm(latent[:, :rank], kv_norm, eps=eps)
    entries = stored(torch.cat((normed, latent[:, rank:]), -1), pages, page_scale)
    store_rows(pages.flatten(0, 1), slot_mapping, entries)
