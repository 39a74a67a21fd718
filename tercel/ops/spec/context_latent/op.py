"""The public function."""

from collections.abc import Mapping

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.spec.context_latent import reference as naive
from tercel.ops.spec.context_latent.contract import CONTRACT


def _refuses(sizes: Mapping[str, int]) -> str | None:
    """A program holds what turns in registers, pair by pair."""
    turned = sizes["E"] - sizes["L"]
    if turned & (turned - 1) == 0:
        return None
    return f"E - L={turned}; it turns a power of two of channels"


@operation(
    CONTRACT,
    reference(naive.context_latent),
    kernel("triton", naive.context_latent, admits=_refuses),
)
def context_latent(
    x: torch.Tensor,
    weight: torch.Tensor,
    kv_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> None:
    """Writes the latents of context tokens into the pages of all layers.

    Args:
        x: [T, N] activations: the normed projection of the tokens' taps; rows contiguous.
        weight: [LAYERS * E, N] in the dtype of x: the kv_a projection of every layer.
        kv_norm: [LAYERS, L] in the dtype of x.
        inv_freq: [(E - L) / 2] fp32 radians per position.
        positions: [T] i64 of the tokens.
        pages: [LAYERS, PAGES, PS, E] in the dtype of x; the entries at slot_mapping are replaced.
        slot_mapping: [T] i64, page * PS + offset; page 0 is the sink of padded tokens.
        eps: of the latent's norm.
        rope_scale, interleaved: as of qk_norm_rope.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        two tokens at one live position; a position outside the pool, or off by one.
    Source: DSpark, arXiv 2607.05147; DeepSeek-V3.
    """
