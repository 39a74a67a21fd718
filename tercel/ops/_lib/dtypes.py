"""The dtypes that ops compute in."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of its sums: fp32, or fp64 where x is."""
    return x.to(wide_dtype(x))


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
