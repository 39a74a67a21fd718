"""attention/mla_append, one program per token: ops/_lib/kernel_latent.py."""

import torch

from tercel.ops._lib.kernel_latent import Store, append


def mla_append(
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> None:
    append(Store(latent, kv_norm, eps, pages, slot_mapping, page_scale))
