"""norm/embed_rms_norm, one program per token."""

import torch

from tercel.ops._lib.kernel_row_norm import row_norm


def embed_rms_norm(
    tokens: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    snapshot: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    embedding = table.new_empty(len(tokens), table.shape[1])
    normed = row_norm(table, weight, eps, ids=tokens, copies=(embedding, snapshot))
    assert normed is not None
    return normed, embedding
