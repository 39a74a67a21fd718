"""Gather, copy, norm."""

import torch

from tercel.ops.norm.rms_norm.reference import rms_norm


def embed_rms_norm(
    tokens: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    snapshot: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    embedding = table[tokens]
    if snapshot is not None:
        snapshot.copy_(embedding)
    return rms_norm(embedding, weight, eps=eps), embedding
