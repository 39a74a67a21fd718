"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.attention.mla_query_rope import reference as naive
from tercel.ops.attention.mla_query_rope.contract import CONTRACT


@operation(CONTRACT, reference(naive.mla_query_rope), kernel("triton", naive.mla_query_rope))
def mla_query_rope(
    q: torch.Tensor,
    q_norm: torch.Tensor,
    q_b: torch.Tensor,
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    w_k: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in the space of cached latents, and the tokens' own entries, turned by position.

    Args:
        q: [T, Q] activations of the q_a projection; rows contiguous.
        q_norm: [Q] in the dtype of q.
        q_b: [H * (K + E - L), Q] in the dtype of q, nn.Linear layout.
        latent: [T, E] activations of the kv_a projection, latent | shared key part; rows.
        kv_norm: [L] in the dtype of q.
        w_k: [H, K, L] in the dtype of q, any strides: the key rows of kv_b.
        inv_freq: [(E - L) / 2] fp32 radians per position.
        positions: [T] i64.
        eps: of both norms.
        rope_scale, interleaved: as of qk_norm_rope.
    Returns:
        (query [T, H, E], entry [T, E]) in the dtype of q, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        the other pairing of channels; positions off by one.
    Source: DeepSeek-V3; DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
