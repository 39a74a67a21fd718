"""The accepted drafts committed, then each row as one short sequence of which only the first token
stays in the state."""

import torch

from tercel.ops.linear_attention.causal_conv1d.reference import causal_conv1d
from tercel.ops.linear_attention.kda_commit.reference import kda_commit
from tercel.ops.linear_attention.kda_decode.reference import gated_norm
from tercel.ops.linear_attention.kda_gate.reference import kda_gate
from tercel.ops.linear_attention.kda_prefill.reference import kda_prefill, l2_normalize, split_heads


def kda_verify(
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
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    *,
    width: int,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    kda_commit(conv, recurrent, draft_k, draft_v, draft_g, draft_beta, slots, pending)
    _, heads, v_dim, k_dim = recurrent.shape
    past, drafts, zero = conv_weight.shape[1] - 1, width - 1, torch.zeros_like(slots[:1])
    g = kda_gate(f, A_log, dt_bias, lower_bound=lower_bound)
    o = torch.empty_like(gate).view(-1, heads, v_dim)
    for row, slot in enumerate(slots.tolist()):
        tokens = slice(row * width, (row + 1) * width)
        window = conv[slot : slot + 1, :past].clone()
        one, old = (0, width), (False,)
        rows = qkv[tokens]
        y = causal_conv1d(rows, conv_weight, window.clone(), zero, cu_seqlens=one, fresh=old)
        running = recurrent[slot : slot + 1].clone()
        o[tokens] = kda_prefill(y, g[tokens], b[tokens], running, zero, cu_seqlens=one, fresh=old)
        first, state = row * width, recurrent[slot : slot + 1]
        token = (y[:1], g[first : first + 1], b[first : first + 1])
        kda_prefill(*token, state, zero, cu_seqlens=(0, 1), fresh=old)
        conv[slot, : past + drafts] = torch.cat((window[0], rows))[1:]
        _, k, v = split_heads(y.to(recurrent.dtype), heads, k_dim, v_dim)
        draft_k[slot, :drafts] = l2_normalize(k)[1:]
        draft_v[slot, :drafts] = v[1:]
        draft_g[slot, :drafts] = g[tokens][1:]
        draft_beta[slot, :drafts] = b[tokens][1:].to(recurrent.dtype).sigmoid()
    normed = gated_norm(o.to(recurrent.dtype), gate.to(recurrent.dtype), o_norm, eps)
    return normed.to(qkv.dtype)
