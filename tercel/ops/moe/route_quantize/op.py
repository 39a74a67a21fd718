"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.moe.route_quantize import reference as naive
from tercel.ops.moe.route_quantize.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.route_quantize),
    kernel("triton", naive.route_quantize, triggers_early=False),
)
def route_quantize(
    logits: torch.Tensor, bias: torch.Tensor, z: torch.Tensor, *, top_k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of each token with their weights, and the MXFP8 form of what they read.

    Args:
        logits: [T, E] fp32 over the experts of all ranks, T up to 64.
        bias: [E] fp32, added to the scores for the selection only.
        z: [T, L] act, L a multiple of 32.
        top_k: experts per token.
        scaling: what a token's weights sum to.
    Returns:
        (ids [T, top_k] i64 and weights [T, top_k] fp32 as moe/route gives them, except that the
        division is in fp64; codes [T, L] e4m3; scale [T, L / 32] u8, 2 ** (scale - 127)), newly
        allocated, without gradients. A row of logits with NaN still gets ids of experts; a block
        of z with a value that is not finite gets codes that are not numbers.
    Raises:
        ContractError: more tokens, a shape or dtype outside the contract, or top_k outside 1..E.
    Source: Kimi K3 modeling_kimi_linear.py, the MoE gate; OCP Microscaling formats v1.0.
    """
