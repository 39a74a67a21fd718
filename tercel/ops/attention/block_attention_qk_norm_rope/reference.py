"""The two references in sequence."""

import torch

from tercel.ops.attention.block_attention.reference import block_attention
from tercel.ops.attention.qk_norm_rope.reference import qk_norm_rope


def block_attention_qk_norm_rope(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    eps: float,
    rope_scale: float,
    interleaved: bool,
    scale: float,
    window: int | None,
    window_from_anchor: bool,
    causal: bool,
) -> torch.Tensor:
    positions = torch.cat([anchor + torch.arange(width) for anchor in context_lens.tolist()])
    q, k = qk_norm_rope(
        qkv,
        q_norm,
        k_norm,
        inv_freq,
        positions.to(qkv.device),
        heads=heads,
        kv_heads=kv_heads,
        eps=eps,
        rope_scale=rope_scale,
        interleaved=interleaved,
    )
    return block_attention(
        q,
        k,
        qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)[:, heads + kv_heads :],
        k_cache,
        v_cache,
        block_table,
        context_lens,
        width=width,
        v_dim=k.shape[-1],
        scale=scale,
        window=window,
        window_from_anchor=window_from_anchor,
        causal=causal,
    )
