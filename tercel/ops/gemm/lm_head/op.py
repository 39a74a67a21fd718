"""The public function."""

import torch

from tercel.contract import kernel, operation, ordered, portable, reference
from tercel.ops.gemm.lm_head import ordered as tiled
from tercel.ops.gemm.lm_head import portable as fast
from tercel.ops.gemm.lm_head import reference as naive
from tercel.ops.gemm.lm_head.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.lm_head),
    portable(fast.lm_head),
    ordered(tiled.lm_head),
    kernel("gluon", naive.lm_head),
    kernel("triton", naive.lm_head),
)
def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits of the rows over this rank's part of the vocabulary.

    Args:
        x: [S, N] act, normed hidden rows; rows contiguous. S may be 0.
        weight: [V, N] act, this rank's rows of the head.
    Returns:
        [S, V] fp32 holding values of act, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, lm_head; transformers GenerationMixin.
    """
