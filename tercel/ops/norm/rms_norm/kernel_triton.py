"""norm/rms_norm, one program per row."""

import torch

from tercel.ops._lib.kernel_row_norm import row_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    normed = row_norm(x, weight, eps)
    assert normed is not None
    return normed
