"""A token at a time over the entries it sees, in at least fp32."""

import torch

from tercel.ops._lib.latent import loaded
from tercel.ops._lib.pools import positions


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
    work = torch.promote_types(query.dtype, torch.float32)
    rank = w_v.shape[2]
    outputs = []
    for token in range(query.shape[0]):
        row, draft = divmod(token, width)
        seen = int(context_lens[row]) + draft + 1
        where = positions(block_table[row], pages.shape[1])[:seen]
        entries = loaded(pages.flatten(0, 1)[where], work, page_scale)
        scores = (query[token].to(work) @ entries.t()) * scale
        latent = (scores.softmax(-1) @ entries[:, :rank]).to(query.dtype)
        outputs.append((w_v @ latent.unsqueeze(-1)).flatten())
    out = torch.stack(outputs)
    return out if gate is None else out * gate
