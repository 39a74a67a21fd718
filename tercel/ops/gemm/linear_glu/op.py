"""The public function."""

import torch

from tercel.contract import kernel, operation, ordered, portable, reference
from tercel.ops.gemm.linear_glu import ordered as tiled
from tercel.ops.gemm.linear_glu import portable as fast
from tercel.ops.gemm.linear_glu import reference as naive
from tercel.ops.gemm.linear_glu.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.linear_glu),
    portable(fast.linear_glu),
    ordered(tiled.linear_glu),
    kernel("triton", naive.linear_glu, triggers_early=False),
)
def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """The gated product of x times the transposed gate and up weights, for any number of rows.

    Args:
        x: [T, K] act; rows contiguous.
        weight: [2 * I, K] act, gate rows then up rows.
        activation: situ or silu.
        beta, linear_beta: bounds of situ, positive; without linear_beta its up factor is
            unbounded. silu does not read them.
    Returns:
        [T, I] in the dtype of x, newly allocated.
    Raises:
        ContractError: an odd number of weight rows, a shape or dtype outside the contract, an
            unknown activation, situ without beta.
    Source: Kimi K3 modeling_kimi_linear.py; Kimi-Linear modeling_kimi.py, KimiMLP.
    """
