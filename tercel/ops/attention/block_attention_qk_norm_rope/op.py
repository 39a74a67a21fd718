"""The public function."""

from collections.abc import Mapping

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.attention.block_attention_qk_norm_rope import portable as fast
from tercel.ops.attention.block_attention_qk_norm_rope import reference as naive
from tercel.ops.attention.block_attention_qk_norm_rope.contract import CONTRACT

HEAD_SIZES = (16, 32, 64, 128, 256)


def _refuses(sizes: Mapping[str, int]) -> str | None:
    """Rows of the kernel are whole heads."""
    if sizes["D"] in HEAD_SIZES:
        return None
    return f"D={sizes['D']}; its head sizes are {HEAD_SIZES}"


@operation(
    CONTRACT,
    reference(naive.block_attention_qk_norm_rope),
    portable(fast.block_attention_qk_norm_rope),
    kernel("triton", naive.block_attention_qk_norm_rope, admits=_refuses),
)
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
    """qk_norm_rope and block_attention in one call.

    Args:
        qkv: [R * width, (H + 2 * KV) * D] activations, q | k | v, a request's slots together; rows
            contiguous. Not written.
        q_norm, k_norm: [D] in the dtype of qkv.
        inv_freq: [D / 2] fp32 radians per position.
        k_cache, v_cache: [PAGES, PS, KV, D] of one layer; may be views of a wider pool.
        block_table: [R, PG] i64 pages of each request, the sink behind its end. Kernels read it and
            context_lens before the wait for the previous launch, which must find them written.
        context_lens: [R] i64 tokens that the cache holds: the position of the anchor, slot 0.
        heads, kv_heads: H and KV of this rank.
        width: slots of a block.
        eps, rope_scale, interleaved: as of qk_norm_rope.
        scale, window, window_from_anchor, causal: as of block_attention.
    Returns:
        [R * width, H * D] in the dtype of qkv, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        a context past the block table; a context row that nobody wrote; the other pairing.
    Source: DSpark, arXiv 2607.05147; Qwen3.
    """
