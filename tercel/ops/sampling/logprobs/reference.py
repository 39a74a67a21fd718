"""A log softmax, gathers and a stable sort."""

import torch


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    column = tokens.unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    top_ids = order[:, :top].contiguous()
    rank = (logits > logits.gather(1, column)).sum(-1) + 1
    return values.gather(1, column).squeeze(1), values.gather(1, top_ids), top_ids, rank
