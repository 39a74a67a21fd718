"""The public function."""

from collections.abc import Mapping

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.linear_attention.kda_prefill import portable as chunked
from tercel.ops.linear_attention.kda_prefill import reference as naive
from tercel.ops.linear_attention.kda_prefill.contract import CONTRACT

HEAD_SIZES = (16, 32, 64, 128)


def _refuses(sizes: Mapping[str, int]) -> str | None:
    """Tiles of the kernels are whole heads."""
    if sizes["K"] in HEAD_SIZES and sizes["V"] in HEAD_SIZES:
        return None
    return f"K={sizes['K']} and V={sizes['V']}; its head sizes are {HEAD_SIZES}"


@operation(
    CONTRACT,
    reference(naive.kda_prefill),
    portable(chunked.kda_prefill),
    kernel("triton", naive.kda_prefill, admits=_refuses),
)
def kda_prefill(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    """KDA outputs of sequences, before the gated norm; their states are carried on.

    Args:
        qkv: [T, H * (2K + V)] activations after the convolution, q | k | v; rows contiguous.
        g: [T, H, K] fp32 log decays, at most 0.
        b: [T, H] activations; beta is their sigmoid.
        state: [SLOTS, H, V, K] fp32; the slots of the sequences are replaced.
        slots: [N] int64, one per sequence.
        cu_seqlens: N + 1 bounds into T.
        fresh: N flags; a fresh sequence starts from zeros.
    Returns:
        [T, H, V] in the dtype of qkv, newly allocated.
    Raises:
        ContractError: a shape, dtype or count outside the contract.
    Wrong, silently:
        one slot for two sequences; g above 0.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
    """
