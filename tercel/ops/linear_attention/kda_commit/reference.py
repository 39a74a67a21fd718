"""The recurrence over the accepted drafts, one at a time, in the dtype of the state."""

import torch

from tercel.ops.linear_attention.kda_prefill.reference import update


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
    past = conv.shape[1] - draft_k.shape[1]
    records = tuple(x.to(recurrent.dtype) for x in (draft_k, draft_v, draft_g, draft_beta))
    for slot, count in zip(slots.tolist(), pending.tolist(), strict=True):
        for draft in range(count):
            update(recurrent[slot], *(record[slot, draft] for record in records))
        conv[slot, :past] = conv[slot, count : count + past].clone()
