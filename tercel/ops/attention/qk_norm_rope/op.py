"""The public function."""

from collections.abc import Mapping

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.attention.qk_norm_rope import portable as fast
from tercel.ops.attention.qk_norm_rope import reference as naive
from tercel.ops.attention.qk_norm_rope.contract import CONTRACT

HEAD_SIZES = (16, 32, 64, 128, 256)


def _refuses(sizes: Mapping[str, int]) -> str | None:
    """Rows of the kernel are whole heads."""
    if sizes["D"] in HEAD_SIZES:
        return None
    return f"D={sizes['D']}; its head sizes are {HEAD_SIZES}"


@operation(
    CONTRACT,
    reference(naive.qk_norm_rope),
    portable(fast.qk_norm_rope),
    kernel("triton", naive.qk_norm_rope, admits=_refuses),
)
def qk_norm_rope(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed and turned queries and keys of a packed projection.

    Args:
        qkv: [T, (H + 2 * KV) * D] activations, q | k | v; rows contiguous.
        q_norm, k_norm: [D] in the dtype of qkv, the same for every head.
        inv_freq: [D / 2] fp32 radians per position.
        positions: [T] i64.
        heads, kv_heads: H and KV of this rank.
        eps: added to the mean square, inside the root.
        rope_scale: multiplies cos and sin.
        interleaved: whether neighbouring channels turn together; False: one of each half.
    Returns:
        (q [T, H, D], k [T, KV, D]) in the dtype of qkv, newly allocated; they may be views of one
        tensor.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        the other pairing of channels; positions off by one.
    Source: Qwen3; RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071.
    """
