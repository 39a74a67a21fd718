"""The parts of the two ops, on views of the projection."""

import torch

from tercel.ops._lib.block_attention import attend
from tercel.ops._lib.rope import norm_rotate_heads


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
    slots = torch.arange(width, device=qkv.device)
    positions = (context_lens.unsqueeze(1) + slots).flatten()
    q, k = norm_rotate_heads(
        qkv,
        q_norm,
        k_norm,
        inv_freq,
        positions,
        heads=heads,
        kv_heads=kv_heads,
        eps=eps,
        rope_scale=rope_scale,
        interleaved=interleaved,
    )
    return attend(
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
