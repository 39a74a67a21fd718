"""What a step's draws gave, while it is still on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Verdict:
    """One entry per request that samples: the prefill rows that do, then the verify rows."""

    tokens: torch.Tensor
    """[D, W] i64: the drafts that are kept, then the token after them in every place left, so that
    the last column is what the request goes on from."""
    accepted: torch.Tensor
    """[D] i64 drafts that are kept."""
    finite: torch.Tensor
    """[D] bool: False where no token could be drawn."""
    reported: tuple[int, ...]
    """Draws (rows of logits) whose log-probabilities are asked for."""
    logits: torch.Tensor
    """[len(reported), V] their logits before penalties."""


@dataclass(frozen=True)
class Drafted:
    """Guesses for the next step, one row per entry of the verdict."""

    tokens: torch.Tensor
    """[D, g] i64."""
    confidence: torch.Tensor | None
    """[D, g] logits of the chance that each is accepted if those before it are."""
