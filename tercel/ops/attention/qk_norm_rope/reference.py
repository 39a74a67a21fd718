"""Head by head, pair by pair, in at least fp32."""

import torch

from tercel.ops._lib.dtypes import wide


def qk_norm_rope(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = wide(qkv).view(qkv.shape[0], heads + 2 * kv_heads, -1)
    q = normalize(parts[:, :heads], q_norm, eps)
    k = normalize(parts[:, heads : heads + kv_heads], k_norm, eps)
    q = rotate(q, positions, inv_freq, scale=rope_scale, interleaved=interleaved)
    k = rotate(k, positions, inv_freq, scale=rope_scale, interleaved=interleaved)
    return q.to(qkv.dtype), k.to(qkv.dtype)


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] over its root mean square, times the weight; nothing is rounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """x [T, ..., D] turned pair by pair."""
    turned, half = torch.empty_like(x), x.shape[-1] // 2
    for pair, frequency in enumerate(inv_freq.double()):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        angle = (positions.double() * frequency).view(-1, *(1,) * (x.dim() - 2))
        cos, sin = (scale * angle.cos()).to(x.dtype), (scale * angle.sin()).to(x.dtype)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned
