"""From a stored tensor to the part of a weight that it makes: views only, nothing is copied."""

from collections.abc import Callable

import torch

View = Callable[[torch.Tensor], torch.Tensor]


def as_stored(x: torch.Tensor) -> torch.Tensor:
    return x


def flatten(x: torch.Tensor) -> torch.Tensor:
    """[1, N] -> [N]."""
    return x.flatten()


def squeeze_taps(x: torch.Tensor) -> torch.Tensor:
    """Depthwise convolution [C, 1, W] -> [C, W]."""
    return x.squeeze(1)


def first(count: int) -> View:
    """Any shape -> its first `count` values; what follows is padding."""
    return lambda x: x.flatten()[:count]


def key_half(num_heads: int, key_dim: int) -> View:
    """kv_b [H * (K + V), R] -> w_k [H, K, R]."""
    return lambda x: x.view(num_heads, -1, x.shape[-1])[:, :key_dim]


def value_half(num_heads: int, key_dim: int) -> View:
    """kv_b [H * (K + V), R] -> w_v [H, V, R]."""
    return lambda x: x.view(num_heads, -1, x.shape[-1])[:, key_dim:]


def rows(start: int, stop: int) -> View:
    """Part `start` .. `stop` of a projection that is stored with others."""
    return lambda x: x[start:stop]


def as_row(x: torch.Tensor) -> torch.Tensor:
    """[N] -> [1, N], to be stacked."""
    return x.unsqueeze(0)
