"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.gemm.head_linear import reference as naive
from tercel.ops.gemm.head_linear.contract import CONTRACT


@operation(CONTRACT, reference(naive.head_linear), kernel("triton", naive.head_linear))
def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's part of a row times that head's matrix.

    Args:
        x: [T, H * K] act; rows contiguous.
        weight: [H, M, K] act, nn.Linear layout per head, any strides.
    Returns:
        [T, H * M] act, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
