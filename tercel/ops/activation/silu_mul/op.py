"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.activation.silu_mul import portable as fast
from tercel.ops.activation.silu_mul import reference as naive
from tercel.ops.activation.silu_mul.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.silu_mul),
    portable(fast.silu_mul),
    kernel("triton", naive.silu_mul, triggers_early=False),
)
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The SiLU-gated product of the two halves of each row.

    Args:
        gate_up: [T, 2 * I] act, the gate half first; rows contiguous.
    Returns:
        [T, I] in the dtype of gate_up, newly allocated.
    Raises:
        ContractError: an odd width or a dtype outside the contract.
    Source: Kimi-Linear modeling_kimi.py, KimiMLP with hidden_act silu.
    """
