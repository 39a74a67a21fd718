"""The dtypes that ops compute in."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of its sums: fp32, or fp64 where x is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
