"""Two chunks per row: accepted drafts with the first token, which move the state on, and the new
drafts, which only read it."""

import torch

from tercel.ops._lib.delta_rule import advance, power_of_two, prepare, run_chunk, strength
from tercel.ops._lib.drafts import heads_first, pending_drafts, pending_window
from tercel.ops._lib.pools import store_rows
from tercel.ops.linear_attention.causal_conv1d.reference import convolve
from tercel.ops.linear_attention.kda_decode.reference import gated_norm
from tercel.ops.linear_attention.kda_gate.reference import kda_gate
from tercel.ops.linear_attention.kda_prefill.reference import l2_normalize, split_heads


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
    _, heads, v_dim, k_dim = recurrent.shape
    work, drafts = recurrent.dtype, draft_k.shape[1]
    rows = torch.unflatten(qkv, 0, (-1, width))
    y = _convolve(rows, conv_weight, conv, slots, pending).to(work)
    q, k, v = split_heads(y, heads, k_dim, v_dim)
    q, k = l2_normalize(q) * k_dim**-0.5, l2_normalize(k)
    g = kda_gate(f, A_log, dt_bias, lower_bound=lower_bound).view(k.shape)
    beta = strength(b, work).view(-1, width, heads, 1)
    new = (k, v, g, beta)

    records = (draft_k, draft_v, draft_g, draft_beta.unsqueeze(-1))
    accepted = pending_drafts(records, slots, pending)
    history = [torch.cat((old.to(work), x[:, :1]), 1) for old, x in zip(accepted, new, strict=True)]
    for record, x in zip(records, new, strict=True):
        record[:, : width - 1].index_copy_(0, slots, x[:, 1:].to(record.dtype))

    state = recurrent.index_select(0, slots).flatten(0, 1)
    length = power_of_two(drafts + 1)
    keys, *others = (heads_first(x, length) for x in history)
    queries = torch.zeros_like(keys)
    queries[:, drafts] = q[:, 0].flatten(0, 1)
    chunk = prepare(queries, keys, *others)
    first, errors = run_chunk(chunk, state)
    advance(chunk, state, errors)
    store_rows(recurrent, slots, state.view(-1, *recurrent.shape[1:]))

    outputs = [first[:, drafts : drafts + 1]]
    if width > 1:
        length = power_of_two(width - 1)
        unsure, _ = run_chunk(prepare(*(heads_first(x[:, 1:], length) for x in (q, *new))), state)
        outputs.append(unsure[:, : width - 1])
    o = torch.cat(outputs, 1).view(-1, heads, width, v_dim).transpose(1, 2).flatten(0, 1)
    return gated_norm(o, gate.to(work), o_norm, eps).to(qkv.dtype)


def _convolve(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    conv: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
) -> torch.Tensor:
    """[R, width, C] -> [R, width, C]; each slot's window ends with the row's first token, and the
    raw drafts follow it."""
    rows = torch.cat((pending_window(conv, slots, pending, weight.shape[1] - 1), qkv), 1)
    store_rows(conv[:, : rows.shape[1] - 1], slots, rows[:, 1:])
    return convolve(rows, weight.t()).to(qkv.dtype)
