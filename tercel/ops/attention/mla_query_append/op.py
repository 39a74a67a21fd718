"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.attention.mla_query_append import portable as few_calls
from tercel.ops.attention.mla_query_append import reference as naive
from tercel.ops.attention.mla_query_append.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.mla_query_append),
    portable(few_calls.mla_query_append),
    kernel("triton", naive.mla_query_append),
)
def mla_query_append(
    q: torch.Tensor,
    q_norm: torch.Tensor | None,
    q_b: torch.Tensor | None,
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    w_k: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_eps: float,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries in the space of the cached latents; the tokens' own latents are appended.

    Args:
        q: [T, Q] activations: the query latent, or queries where q_norm and q_b are None; rows.
        q_norm: [Q] in the dtype of q, or None.
        q_b: [H * (K + E - L), Q] in the dtype of q, nn.Linear layout, or None.
        latent: [T, E] activations of the kv_a projection, latent | shared key part; rows.
        kv_norm: [L] in the dtype of q.
        w_k: [H, K, L] in the dtype of q, any strides: the key rows of kv_b.
        pages: [PAGES, PS, E] in the dtype of q, or e4m3; the entries at slot_mapping are replaced.
        slot_mapping: [T] int64, page * PS + offset; page 0 is the sink of padded tokens.
        q_eps: of the query latent's norm.
        eps: of the latent's norm.
        page_scale: [1] fp32, with e4m3 pages: they hold values divided by it.
    Returns:
        [T, H, E] in the dtype of q, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract, or one of q_norm and q_b alone.
    Wrong, silently:
        two tokens at one live position; a position outside the pool; a scale that readers lack.
    Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention.
    """
