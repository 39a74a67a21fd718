"""What a slot remembers of the drafts that its latest step verified."""

import torch


def pending_window(
    conv: torch.Tensor, slots: torch.Tensor, pending: torch.Tensor, rows: int
) -> torch.Tensor:
    """[R, rows, C] the raw rows that end with the last accepted draft."""
    first = slots * conv.shape[1] + pending
    index = first.unsqueeze(1) + torch.arange(rows, device=conv.device)
    window = conv.flatten(0, 1).index_select(0, index.flatten())
    return window.view(-1, rows, conv.shape[2])


def pending_drafts(
    records: tuple[torch.Tensor, ...], slots: torch.Tensor, pending: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Records [SLOTS, D, H, *] -> [R, D, H, *] with zeros, tokens that change no state, for drafts
    that were not accepted: whatever is stored there, NaN included, has no effect."""
    drafts = records[0].shape[1]
    rejected = torch.arange(drafts, device=slots.device) >= pending.unsqueeze(1)
    rejected = rejected[:, :, None, None]
    return tuple(x.index_select(0, slots).masked_fill_(rejected, 0.0) for x in records)


def heads_first(x: torch.Tensor, length: int) -> torch.Tensor:
    """[R, L, H, D] -> [R * H, length, D], zeros behind the last token."""
    padded = torch.zeros(x.shape[0], x.shape[2], length, x.shape[3], dtype=x.dtype, device=x.device)
    padded[:, :, : x.shape[1]] = x.transpose(1, 2)
    return padded.flatten(0, 1)
