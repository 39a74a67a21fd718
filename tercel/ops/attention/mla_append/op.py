"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.attention.mla_append import reference as naive
from tercel.ops.attention.mla_append.contract import CONTRACT


@operation(CONTRACT, reference(naive.mla_append), kernel("triton", naive.mla_append))
def mla_append(
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> None:
    """Normalises tokens' latents and writes them into their pages.

    Args:
        latent: [T, E] activations of the kv_a projection, latent | shared key part; rows.
        kv_norm: [L] in the dtype of latent.
        pages: [PAGES, PS, E] in the dtype of latent, or e4m3; the entries at slot_mapping are
            replaced.
        slot_mapping: [T] int64, page * PS + offset; page 0 is the sink of padded tokens.
        eps: of the latent's norm.
        page_scale: [1] fp32, with e4m3 pages: they hold values divided by it.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        two tokens at one live position; a position outside the pool; a scale that readers lack.
    Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention.
    """
