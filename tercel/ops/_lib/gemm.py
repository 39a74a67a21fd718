"""Products with weights in nn.Linear layout, on torch's fused functions."""

import math
from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

FEW_ROWS = 8
LARGE_WEIGHT = 1 << 15
MAX_PARTS = 8
TILE = 16


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """act(x [T, K] @ weight [M, K]^T), fp32 sums.

    A CPU's plain product of few fp32 rows reads a large weight at half of the memory's speed, and
    on one thread. With the weight on the left it does neither, unless a lone row makes it a
    matrix-vector product: so that one is cut into a batch. Projections of a small model that is
    not in cache take 0.5 of the time for one row and 0.8 for eight (EPYC, one thread, MKL 2024.2);
    on two threads 0.4 and 0.5.
    """
    rows, large = len(x), weight.numel() >= LARGE_WEIGHT
    if x.dtype != torch.float32 or not x.is_cpu or not large or not 0 < rows <= FEW_ROWS:
        return torch.nn.functional.linear(x, weight)
    if rows > 1:
        return torch.mm(weight, x.t()).t().contiguous()
    columns, depth = weight.shape
    parts = math.gcd(columns, MAX_PARTS)
    column = x.view(-1).unsqueeze(0).t()  # not view(-1, 1), whose strides choose a slower product
    return torch.bmm(weight.view(parts, -1, depth), column.expand(parts, -1, -1)).view(1, columns)


def ordered_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """matmul one tile of weight rows at a time. A CPU library chooses its order of sums by the size
    of the product; here every product has the size [TILE, K] x [K, T], so that an element's bits do
    not depend on how many other rows of the weight a rank holds."""
    padding = -weight.shape[0] % TILE
    tiles = torch.split(torch.nn.functional.pad(weight, (0, 0, 0, padding)), TILE)
    product = torch.cat([torch.mm(tile, x.t()) for tile in tiles])
    return product[: weight.shape[0]].t().contiguous()


def linear(
    x: torch.Tensor, weight: torch.Tensor, sigmoid_from: int | None, product: Product = matmul
) -> torch.Tensor:
    """The product; columns from `sigmoid_from` on are act(sigmoid(.)) of that."""
    y = product(x, weight)
    if sigmoid_from is not None:
        y[:, sigmoid_from:].sigmoid_()
    return y
