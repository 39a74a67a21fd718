"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.linear_attention.causal_conv1d import reference as naive
from tercel.ops.linear_attention.causal_conv1d.contract import CONTRACT


@operation(CONTRACT, reference(naive.causal_conv1d), kernel("triton", naive.causal_conv1d))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    """Sequences convolved per channel with their own past, then SiLU.

    Args:
        x: [T, C] activations before the convolution; rows contiguous.
        weight: [C, W] fp32, the current token's tap last; channels fastest in memory is faster.
        state: [SLOTS, S, C] in the dtype of x, S >= W - 1; rows 0 .. W - 2 of a sequence's slot
            hold its past, oldest first, and are replaced.
        slots: [N] int64, one per sequence.
        cu_seqlens: N + 1 bounds into T.
        fresh: N flags; a fresh sequence has zeros for a past.
    Returns:
        [T, C] in the dtype of x, newly allocated.
    Raises:
        ContractError: a shape, dtype or count outside the contract.
    Wrong, silently:
        one slot for two sequences.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
    """
