"""Sigmoid scores, a stable sort of the biased ones, normalised raw ones."""

import torch


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, scaling: float, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(logits)
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids, weights if scaling == 1.0 else weights * scaling
