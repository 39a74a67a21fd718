"""The recurrence of KDA, token by token, in the dtype of the state."""

from itertools import pairwise

import torch

L2_EPS = 1e-6


def kda_prefill(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    _, heads, v_dim, k_dim = state.shape
    q, k, v = split_heads(qkv.to(state.dtype), heads, k_dim, v_dim)
    q, k, beta = l2_normalize(q) * k_dim**-0.5, l2_normalize(k), b.to(state.dtype).sigmoid()
    o = torch.empty_like(v)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        slot = int(slots[row])
        if fresh[row]:
            state[slot].zero_()
        for t in range(start, stop):
            update(state[slot], k[t], v[t], g[t], beta[t])
            o[t] = read(state[slot], q[t])
    return o.to(qkv.dtype)


def split_heads(
    qkv: torch.Tensor, heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., H * (2K + V)] -> q, k [..., H, K] and v [..., H, V]."""
    q, k, v = torch.split(qkv, [heads * k_dim, heads * k_dim, heads * v_dim], -1)
    by_head = (*qkv.shape[:-1], heads, -1)
    return q.view(by_head), k.view(by_head), v.view(by_head)


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """Rows over their length; eps is added to the sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def update(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    """One token on state [H, V, K] in place: decay, then the delta rule."""
    state *= g.exp().unsqueeze(-2)
    error = beta.unsqueeze(-1) * (v - read(state, k))
    state += error.unsqueeze(-1) * k.unsqueeze(-2)


def read(state: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[H, V, K] and [H, K] -> [H, V]."""
    return (state * q.unsqueeze(-2)).sum(-1)
