"""attention/block_attention_qk_norm_rope: block_attention's launches, which norm and turn a block's
queries and keys as they load them."""

import torch

from tercel.ops._lib.kernel_block_attention import Seen, Turn, attend


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
    rows = qkv.unflatten(1, (heads + 2 * kv_heads, len(q_norm)))
    q, k, v = rows.split((heads, kv_heads, kv_heads), 1)
    return attend(
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        width=width,
        v_dim=len(q_norm),
        scale=scale,
        seen=Seen(window, window_from_anchor, causal),
        turn=Turn(q_norm, k_norm, inv_freq, eps, rope_scale, interleaved),
    )
