"""The product in wide sums, rounded, then the gate, rounded."""

import torch

from tercel.ops._lib.dtypes import wide


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None
) -> torch.Tensor:
    product = (wide(x) @ wide(weight).T).to(x.dtype)
    if sigmoid_from is None:
        return product
    plain, gate = product[:, :sigmoid_from], product[:, sigmoid_from:]
    return torch.cat([plain, torch.sigmoid(wide(gate)).to(x.dtype)], dim=1)
