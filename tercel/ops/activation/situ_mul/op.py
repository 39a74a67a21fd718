"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.activation.situ_mul import portable as fast
from tercel.ops.activation.situ_mul import reference as naive
from tercel.ops.activation.situ_mul.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.situ_mul),
    portable(fast.situ_mul),
    kernel("triton", naive.situ_mul, triggers_early=False),
)
def situ_mul(gate_up: torch.Tensor, *, beta: float, linear_beta: float | None) -> torch.Tensor:
    """The SiTU-gated product of the two halves of each row.

    Args:
        gate_up: [T, 2 * I] act, the gate half first; rows contiguous.
        beta: bound of the gate's factor, positive.
        linear_beta: bound of the up factor, positive; None leaves it unbounded.
    Returns:
        [T, I] in the dtype of gate_up, newly allocated.
    Raises:
        ContractError: an odd width, a bound that is not positive, a dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, the `situ` activation.
    """
