"""Draws the next token of each row: gather the vocabulary, mask, penalize, sample, report."""

from collections.abc import Iterable

import torch

from tercel.core.group import Group

TARGET_STREAM = 0
"""Randomness of the model's own tokens; drafts and acceptance have streams of their own."""


class Sampler:
    """Every rank draws the same tokens: logits, parameters and randomness are equal on all."""

    def __init__(self, group: Group, illegal_ids: Iterable[int], device: torch.device) -> None:
        """`illegal_ids` are never drawn: padding, input-only slots, ids without a token."""
        self._group = group
        self._device = device
        self._illegal = torch.tensor(sorted(illegal_ids), dtype=torch.int64, device=device)
