"""One head at a time: bits that do not depend on how many heads a rank has."""

import torch

from tercel.ops.attention.mla_decode import portable


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
    out = [
        portable.mla_decode(
            query[:, head : head + 1].contiguous(),
            pages,
            block_table,
            context_lens,
            w_v[head : head + 1],
            None,
            width=width,
            scale=scale,
            page_scale=page_scale,
        )
        for head in range(query.shape[1])
    ]
    return torch.cat(out, 1) if gate is None else torch.cat(out, 1) * gate
