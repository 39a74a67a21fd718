"""Every row's entries gathered through its block table, without reading a length on the host.

Positions past a row's end read its last entry once more, so that nothing stored there, NaN
included, reaches a product; their scores are masked.
"""

import torch

from tercel.ops._lib.latent import loaded

WORKSPACE = 1 << 22
"""Elements of gathered entries that rows share at a time."""
FEW_ROWS = 4
"""Up to which w_v stands on the left: a CPU's batched product takes half of the time then."""


def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    width: int,
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, columns = block_table.shape
    block = max(1, WORKSPACE // (columns * pages[0].numel()))
    latents = [
        _attend(
            query[first * width : (first + block) * width],
            pages,
            block_table[first : first + block],
            context_lens[first : first + block],
            w_v.shape[2],
            width=width,
            scale=scale,
            page_scale=page_scale,
        )
        for first in range(0, rows, block)
    ]
    latent = latents[0] if len(latents) == 1 else torch.cat(latents)
    out = _values(latent, w_v)
    return out if gate is None else out.mul_(gate)


def _values(latent: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """Mixed latents [T, H, L] through the value rows: [T, H * V]."""
    if len(latent) <= FEW_ROWS:
        return torch.bmm(w_v, latent.permute(1, 2, 0)).permute(2, 0, 1).flatten(1).contiguous()
    return torch.bmm(latent.transpose(0, 1), w_v.mT).transpose(0, 1).flatten(1)


def _attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    rank: int,
    *,
    width: int,
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mixed latents [T, H, rank] of the rows of a block."""
    work = torch.promote_types(query.dtype, torch.float32)
    (rows, columns), page_size, heads = block_table.shape, pages.shape[1], query.shape[1]
    position = torch.arange(columns * page_size, device=query.device)
    seen = (context_lens.unsqueeze(1) + torch.arange(width, device=query.device)).unsqueeze(2)
    last = seen[:, -1]
    index = torch.add(position[:page_size], block_table.unsqueeze(2), alpha=page_size).flatten(1)
    index = torch.where(position <= last, index, index.gather(1, last))
    entries = pages.flatten(0, 1).index_select(0, index.flatten())
    entries = loaded(entries, work, page_scale).view(rows, -1, pages.shape[2])
    scores = torch.bmm((query.to(work) * scale).view(rows, width * heads, -1), entries.mT)
    scores.view(rows, width, heads, -1).masked_fill_((position > seen).unsqueeze(2), -torch.inf)
    latent = torch.bmm(scores.softmax(-1), entries[:, :, :rank])
    return latent.to(query.dtype).view(-1, heads, rank)
