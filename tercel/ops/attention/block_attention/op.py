"""The public function."""

from collections.abc import Mapping

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.attention.block_attention import portable as fast
from tercel.ops.attention.block_attention import reference as naive
from tercel.ops.attention.block_attention.contract import CONTRACT

HEAD_SIZES = (16, 32, 64, 128, 256)
LATENT_SIZES = (96, 320, 576)
"""Of keys that hold the values in their first 64, 256 or 512 channels."""


def _refuses(sizes: Mapping[str, int]) -> str | None:
    """Rows of the kernel are whole heads."""
    served = LATENT_SIZES if "v_dim" not in sizes else HEAD_SIZES
    if sizes["D"] in served and sizes.get("v_dim", sizes["D"]) == sizes["D"]:
        return None
    return f"D={sizes['D']}, v_dim={sizes.get('v_dim')}; its head sizes are {served}"


@operation(
    CONTRACT,
    reference(naive.block_attention),
    portable(fast.block_attention),
    kernel("triton", naive.block_attention, admits=_refuses),
)
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
    """Attention of draft blocks over their requests' context and themselves; nothing is stored.

    Args:
        q: [R * width, H, D] activations, a request's slots together; rows contiguous.
        k: [R * width, KV, D] of the block, normed and turned as the cached ones.
        v: [R * width, KV, v_dim]; None: the first v_dim channels of k.
        k_cache: [PAGES, PS, KV, D] of one layer; may be a view of a wider pool.
        v_cache: [PAGES, PS, KV, v_dim]; None with v.
        block_table: [R, PG] i64 pages of each request, the sink behind its end. Kernels read it and
            context_lens before the wait for the previous launch, which must find them written.
        context_lens: [R] i64 tokens that the cache holds: the position of the anchor.
        width: slots of a block.
        v_dim: channels of a value.
        scale: of the scores.
        window: tokens that a slot sees; None: all.
        window_from_anchor: whether a window is the tokens before the anchor, the same for every
            slot; otherwise those less than a window away from the slot.
        causal: whether a slot sees no later slot of its block.
    Returns:
        [R * width, H * v_dim] in the dtype of q, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        a context past the block table; a context row that nobody wrote.
    Source: DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036.
    """
