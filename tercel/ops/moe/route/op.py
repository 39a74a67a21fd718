"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.moe.route import reference as naive
from tercel.ops.moe.route.contract import CONTRACT


@operation(CONTRACT, reference(naive.route), kernel("triton", naive.route, triggers_early=False))
def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, scaling: float, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights.

    Args:
        logits: [T, E] fp32 over the experts of all ranks.
        bias: [E] fp32, added to the scores for the selection only. Kernels read it before the wait
            for the previous launch, which must not write it.
        top_k: experts per token.
        scaling: factor of the weights.
        renormalize: whether the raw scores of a token are divided by their sum.
    Returns:
        (ids [T, top_k] i64, distinct, in descending order of score + bias, ties to the lower id;
        weights [T, top_k] fp32), newly allocated. A row with NaN still gets ids of experts.
    Raises:
        ContractError: a shape or dtype outside the contract, or top_k outside 1..E.
    Source: Kimi K3 modeling_kimi_linear.py, the MoE gate (noaux_tc with one group).
    """
