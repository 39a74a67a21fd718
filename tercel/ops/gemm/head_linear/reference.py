"""One batched product."""

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads, _, width = weight.shape
    rows = x.view(-1, heads, width).transpose(0, 1)
    return torch.bmm(rows, weight.mT).transpose(0, 1).flatten(1)
