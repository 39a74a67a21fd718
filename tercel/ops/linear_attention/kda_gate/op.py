"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.linear_attention.kda_gate import reference as naive
from tercel.ops.linear_attention.kda_gate.contract import CONTRACT


@operation(CONTRACT, reference(naive.kda_gate), kernel("triton", naive.kda_gate))
def kda_gate(
    f: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    """Log decays of KDA, per token, head and key channel.

    Args:
        f: [T, P] activations of the forget projection; rows contiguous.
        A_log: [H] fp32; a checkpoint's padding is already cut off.
        dt_bias: [P] fp32.
        lower_bound: the least log decay, -5.0 for K3; None for the Kimi-Linear form.
    Returns:
        [T, H, P / H] fp32, at most 0, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract, or a lower bound that is not negative.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
    """
