"""Products with weights in nn.Linear layout, on torch's fused functions."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, sigmoid_from: int | None) -> torch.Tensor:
    """act(x @ weight^T); columns from `sigmoid_from` on are act(sigmoid(.)) of that."""
    y = torch.nn.functional.linear(x, weight)
    if sigmoid_from is not None:
        y[:, sigmoid_from:].sigmoid_()
    return y
