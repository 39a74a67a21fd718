"""The product tile by tile: bits that do not depend on how the ranks divide the vocabulary."""

import torch

from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.gemm import ordered_matmul


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return wide(ordered_matmul(x, weight))
