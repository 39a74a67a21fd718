"""Rotary positions, and the norm of heads that goes before them, in few torch calls."""

import torch

from tercel.ops._lib.dtypes import wide


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """x [T, ..., D], wide, each row turned by its position times inv_freq [D / 2].

    Angles are fp64: in fp32 those of a position of a million would be off by a tenth of a radian.
    """
    angles = positions.double().unsqueeze(1) * inv_freq.double()
    shape = (positions.shape[0], *(1,) * (x.dim() - 2), -1)
    cos, sin = (part.mul(scale).to(x.dtype).view(shape) for part in (angles.cos(), angles.sin()))
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    eps: float,
    scale: float,
    interleaved: bool,
) -> torch.Tensor:
    """act(rope(x / rms(x) * weight)) over the last axis of x [T, ..., D]: one rounding."""
    rows = torch.rms_norm(wide(x), weight.shape[-1:], None, eps) * wide(weight)
    turned = rotate(rows, positions, inv_freq, scale=scale, interleaved=interleaved)
    return turned.to(x.dtype)


def norm_rotate_heads(
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
    """See op qk_norm_rope; all heads at once."""
    rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)[:, : heads + kv_heads]
    weights = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
    turned = norm_rotate(
        rows, weights, positions, inv_freq, eps=eps, scale=rope_scale, interleaved=interleaved
    )
    return turned[:, :heads], turned[:, heads:]
