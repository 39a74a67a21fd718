"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.sampling.logprobs import reference as naive
from tercel.ops.sampling.logprobs.contract import CONTRACT


@operation(CONTRACT, reference(naive.logprobs), kernel("triton", naive.logprobs))
def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of the drawn tokens and of the likeliest ones.

    Args:
        logits: [S, V] fp32 over the whole vocabulary.
        tokens: [S] i64, the tokens drawn.
        top: how many of the likeliest tokens; may be 0.
    Returns:
        (chosen [S] fp32, top_values [S, top] fp32, top_ids [S, top] i64 with ties to the lower id,
        rank [S] i64 from 1), newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract, or top outside 0..V.
    Source: OpenAI API (logprobs, top_logprobs); vLLM for the rank.
    """
