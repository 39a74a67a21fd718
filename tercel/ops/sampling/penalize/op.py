"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.sampling.penalize import reference as naive
from tercel.ops.sampling.penalize.contract import CONTRACT


@operation(CONTRACT, reference(naive.penalize), kernel("triton", naive.penalize))
def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias_rows: torch.Tensor,
    bias_tokens: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    """Applies penalties and biases to the listed places of the logits, in place.

    Args:
        logits: [S, V] fp32, written.
        rows, tokens: [C] i64, the penalised places, each once.
        counts: [C] fp32, how often the token is in the row's output.
        seen: [C] fp32, 1 where the token is in the prompt or the output, else 0.
        repetition: [S] fp32 above 0; 1 changes nothing.
        presence: [S] fp32; 0 changes nothing.
        frequency: [S] fp32; 0 changes nothing.
        bias_rows, bias_tokens: [B] i64, the biased places, each once.
        bias_values: [B] fp32, added after the penalties; -inf bars a token.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        a place listed twice.
    Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI API (the others).
    """
