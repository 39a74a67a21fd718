"""The same on torch's fused gather and norm."""

import torch

from tercel.ops._lib.norm import rms_norm


def embed_rms_norm(
    tokens: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    snapshot: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    embedding = torch.embedding(table, tokens)
    if snapshot is not None:
        snapshot.copy_(embedding)
    return rms_norm(embedding, weight, eps), embedding
