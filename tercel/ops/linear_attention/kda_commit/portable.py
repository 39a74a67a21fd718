"""The accepted drafts of every row as one chunk, without reading their number on the host."""

import torch

from tercel.ops._lib.delta_rule import advance, power_of_two, prepare, run_chunk
from tercel.ops._lib.drafts import heads_first, pending_drafts, pending_window
from tercel.ops._lib.pools import store_rows


def kda_commit(
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
) -> None:
    drafts = draft_k.shape[1]
    past = conv.shape[1] - drafts
    window = pending_window(conv, slots, pending, past)
    store_rows(conv[:, :past], slots, window)
    if drafts == 0:
        return
    records = (draft_k, draft_v, draft_g, draft_beta.unsqueeze(-1))
    accepted = pending_drafts(records, slots, pending)
    length = power_of_two(drafts)
    k, v, g, beta = (heads_first(x.to(recurrent.dtype), length) for x in accepted)
    chunk = prepare(k, k, v, g, beta)
    state = recurrent.index_select(0, slots).flatten(0, 1)
    _, errors = run_chunk(chunk, state)
    advance(chunk, state, errors)
    store_rows(recurrent, slots, state.view(-1, *recurrent.shape[1:]))
