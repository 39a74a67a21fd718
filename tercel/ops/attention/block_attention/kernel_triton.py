"""attention/block_attention: ops/_lib/kernel_block_attention.py on queries and keys as they are.

One launch where requests and heads fill the GPU or contexts are short, two where contexts are
divided.
"""

import torch

from tercel.ops._lib.kernel_block_attention import Seen, attend


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
    return attend(
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        width=width,
        v_dim=v_dim,
        scale=scale,
        seen=Seen(window, window_from_anchor, causal),
    )
