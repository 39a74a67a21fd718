"""The latent's norm and an indexed write."""

import torch

from tercel.ops._lib.pools import store_rows
from tercel.ops.norm.rms_norm.reference import rms_norm


def mla_append(
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
) -> None:
    rank = kv_norm.shape[0]
    normed = rms_norm(latent[:, :rank], kv_norm, eps=eps)
    store_rows(pages.flatten(0, 1), slot_mapping, torch.cat((normed, latent[:, rank:]), -1))
