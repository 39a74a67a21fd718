"""Gather, penalise, put back; then add the biases."""

import torch


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
    value = logits[rows, tokens]
    factor = torch.where(seen > 0, repetition[rows], 1.0)
    value = torch.where(value > 0, value / factor, value * factor)
    value = value - frequency[rows] * counts - presence[rows] * (counts > 0)
    logits.index_put_((rows, tokens), value)
    logits.index_put_((bias_rows, bias_tokens), bias_values, accumulate=True)
