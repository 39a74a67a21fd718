"""KDA for one token per row in few calls: at this size a call costs as much as its arithmetic.

The state is read once, for k and q together, before it is updated:
S' q = (S * exp(g)) q + (k.q) e, and (S * exp(g)) x = S (exp(g) * x).
"""

import torch
import torch.nn.functional as F

from tercel.ops._lib.delta_rule import strength
from tercel.ops._lib.pools import store_rows
from tercel.ops.linear_attention.kda_decode.reference import gated_norm
from tercel.ops.linear_attention.kda_gate.reference import kda_gate
from tercel.ops.linear_attention.kda_prefill.reference import l2_normalize


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
    _, heads, v_dim, k_dim = recurrent.shape
    pairs, keys = slots.shape[0] * heads, heads * k_dim
    y = _convolve(qkv, conv_weight, conv, slots).to(recurrent.dtype)
    qk = y[:, : 2 * keys].view(-1, 2, heads, k_dim).transpose(1, 2).reshape(pairs, 2, k_dim)
    qk = l2_normalize(qk)
    decay = kda_gate(f, A_log, dt_bias, lower_bound=lower_bound).exp_().view(pairs, 1, k_dim)
    state = recurrent.index_select(0, slots).view(pairs, v_dim, k_dim)
    from_q, from_k = torch.bmm(qk * decay, state.mT).unbind(1)
    q, k = torch.split(qk, 1, 1)
    beta = strength(b, y.dtype).view(pairs, 1)
    error = torch.sub(y[:, 2 * keys :].reshape(pairs, v_dim), from_k).mul_(beta)
    o = torch.addcmul(from_q, error, torch.linalg.vecdot(q, k)).mul_(k_dim**-0.5)
    state.mul_(decay).addcmul_(error.unsqueeze(2), k)
    store_rows(recurrent, slots, state.view(-1, *recurrent.shape[1:]))
    normed = gated_norm(o.view(-1, heads, v_dim), gate.to(y.dtype), o_norm, eps)
    return normed.to(qkv.dtype)


def _convolve(
    qkv: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """[R, C] -> [R, C]; each slot's window moves on by its row."""
    windows = conv[:, : weight.shape[1] - 1]
    rows = torch.cat((windows.index_select(0, slots), qkv.unsqueeze(1)), 1)
    windows.index_copy_(0, slots, rows[:, 1:])
    return F.silu((rows * weight.t()).sum(1), inplace=True).to(qkv.dtype)
