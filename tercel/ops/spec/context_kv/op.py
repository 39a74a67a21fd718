"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.spec.context_kv import portable as fast
from tercel.ops.spec.context_kv import reference as naive
from tercel.ops.spec.context_kv.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.context_kv),
    portable(fast.context_kv),
    kernel("triton", naive.context_kv),
)
def context_kv(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
    counters: torch.Tensor | None = None,
) -> None:
    """Writes the keys and values of context tokens into the pages of all layers.

    Args:
        x: [T, N] activations: the normed projection of the tokens' taps; rows contiguous.
        weight: [L * 2 * KV * D, N] in the dtype of x: k and v projection of every layer.
        k_norm: [L, D] in the dtype of x.
        inv_freq: [D / 2] fp32 radians per position.
        positions: [T] i64 of the tokens.
        pages: [L, PAGES, PS, 2, KV, D] in the dtype of x, keys then values; the entries at
            slot_mapping are replaced. block_attention reads pages[l, :, :, 0] and [l, :, :, 1].
        slot_mapping: [T] i64, page * PS + offset; page 0 is the sink of padded tokens.
        eps: of the norm of keys.
        rope_scale, interleaved: as of qk_norm_rope.
        counters: [COUNTERS] i32 zeros, left zero, that no other call uses meanwhile: with one for
            each of L * 2 * KV heads and 8 tokens a kernel may divide N among programs.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        two tokens at one live position; a position outside the pool, or off by one.
    Source: DSpark, arXiv 2607.05147; Qwen3.
    """
