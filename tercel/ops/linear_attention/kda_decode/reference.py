"""The layered form: convolution, gate, recurrence, gated norm, with sequences of one token."""

import torch

from tercel.ops.linear_attention.causal_conv1d.reference import causal_conv1d
from tercel.ops.linear_attention.kda_gate.reference import kda_gate
from tercel.ops.linear_attention.kda_prefill.reference import kda_prefill


def kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    slots: torch.Tensor,
    *,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    rows = slots.shape[0]
    bounds, fresh = tuple(range(rows + 1)), (False,) * rows
    y = causal_conv1d(qkv, conv_weight, conv, slots, cu_seqlens=bounds, fresh=fresh)
    g = kda_gate(f, A_log, dt_bias, lower_bound=lower_bound)
    o = kda_prefill(y, g, b, recurrent, slots, cu_seqlens=bounds, fresh=fresh)
    normed = gated_norm(o.to(recurrent.dtype), gate.to(recurrent.dtype), o_norm, eps)
    return normed.to(qkv.dtype)


def gated_norm(
    o: torch.Tensor, gate: torch.Tensor, o_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """[T, H, V] and [T, H * V] -> [T, H * V]: RMSNorm per head times the sigmoid of the gate."""
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * o_norm
    return normed.flatten(1) * gate.sigmoid()
