"""A slot at a time over the rows it sees, in at least fp32."""

import torch

from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.pools import positions


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    width: int,
    v_dim: int,
    scale: float,
    window: int | None,
    window_from_anchor: bool,
    causal: bool,
) -> torch.Tensor:
    v = k[..., :v_dim] if v is None else v
    v_cache = k_cache[..., :v_dim] if v_cache is None else v_cache
    group = q.shape[1] // k.shape[1]
    outputs = []
    for token in range(q.shape[0]):
        request, slot = divmod(token, width)
        anchor = int(context_lens[request])
        context, block = list(range(anchor)), list(range(width))
        if causal:
            block = block[: slot + 1]
        if window is not None and window_from_anchor:
            context = context[max(0, anchor - window) :]
        elif window is not None:
            context = [j for j in context if anchor + slot - j < window]
            block = [m for m in block if abs(slot - m) < window]
        where = positions(block_table[request], k_cache.shape[1])[context]
        own = torch.tensor(block, device=q.device) + request * width
        keys, values = (
            wide(torch.cat((cache.flatten(0, 1)[where], rows[own]))).repeat_interleave(group, 1)
            for cache, rows in ((k_cache, k), (v_cache, v))
        )
        scores = torch.einsum("hd,jhd->hj", wide(q[token]), keys) * scale
        outputs.append(torch.einsum("hj,jhv->hv", scores.softmax(-1), values).flatten())
    return torch.stack(outputs).to(q.dtype)
