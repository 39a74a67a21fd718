"""moe/route with its division in fp64, and core/mxfp8."""

import torch

from tercel.core import mxfp8


def route_quantize(
    logits: torch.Tensor, bias: torch.Tensor, z: torch.Tensor, *, top_k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(logits.detach())
    order = torch.sort(scores + bias.detach(), dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].contiguous()
    chosen = scores.gather(1, ids)
    total = chosen.sum(1, keepdim=True).double() + 1e-20
    weights = (chosen.double() * scaling / total).to(scores.dtype)
    codes, scale = mxfp8.quantize(z.detach())
    return ids, weights, codes, scale
