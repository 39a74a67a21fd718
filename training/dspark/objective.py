"""DSpark's loss on blocks that begin anywhere in an answer.

Source: DSpark, arXiv 2607.05147, and deepseek-ai/DeepSpec: cross entropy with the text, distance to
the target's distribution, and the confidence head's estimate of the chance to be accepted; earlier
slots weigh more. Context is strictly before the anchor, as when decoding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.reference.drafter import Drafter
from training.dspark.data import Corpus
from training.dspark.target import Target


@dataclass(frozen=True)
class Weights:
    """Shares of the loss, as published."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    """Slot j weighs exp(-j / decay)."""


class Loss(NamedTuple):
    total: Tensor
    accepted: Tensor
    """[g] mean chance that a slot's guess is accepted, given that those before it are right."""
    matched: Tensor
    """[g] share of slots whose likeliest token is the text's."""
    confidence: Tensor
    """Mean loss of the confidence head."""


def anchors(corpus: Corpus, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """([B, N] positions, [B, N] whether there is one): tokens of the answer that another follows,
    each at most once."""
    places = torch.arange(corpus.tokens.shape[1], device=corpus.tokens.device)
    allowed = (places >= corpus.starts[:, None]) & (places + 1 < corpus.ends[:, None])
    order = torch.rand(allowed.shape, device=allowed.device, generator=generator)
    score, positions = order.masked_fill(~allowed, -1.0).topk(count)
    return positions.masked_fill(score < 0, 0), score >= 0


def loss(
    drafter: Drafter,
    target: Target,
    corpus: Corpus,
    positions: Tensor,
    exists: Tensor,
    weights: Weights,
) -> Loss:
    """Of blocks at `positions` [B, N]; `exists` says which of them count."""
    c = drafter.config
    slots = c.block_size if c.anchor_predicts else c.block_size - 1
    length = corpus.tokens.shape[1]
    ahead = positions[..., None] + torch.arange(slots + 1, device=positions.device)  # [B, N, g + 1]
    valid = exists[..., None] & (ahead[..., 1:] < corpus.ends[:, None, None])
    ahead = ahead.clamp(max=length - 1)
    text = corpus.tokens[:, None].expand(-1, positions.shape[1], -1).gather(2, ahead)
    previous, labels = text[..., :-1], text[..., 1:]
    index = ahead[..., :-1].flatten(1)[..., None].expand(-1, -1, corpus.hidden.shape[-1])
    taps = corpus.taps.to(target.embed.dtype)
    wanted = (
        target.logits(corpus.hidden.gather(1, index).to(taps.dtype))
        .softmax(-1)
        .view(*labels.shape, -1)
    )

    hidden = drafter(taps, text[..., 0], positions, slots, target.embed)
    logits = drafter.logits(hidden, previous, target.head)
    distance = (logits.softmax(-1) - wanted).abs().sum(-1)
    entropy = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    entropy = entropy.view_as(distance)
    chance = (1 - distance.detach() / 2).clamp(0, 1)
    parts = weights.cross_entropy * entropy + weights.distance * distance
    unsure = torch.zeros_like(distance)
    if c.confidence_head:
        confidence = drafter.confidence(hidden, previous)
        unsure = F.binary_cross_entropy_with_logits(confidence, chance, reduction="none")
        parts = parts + weights.confidence * unsure
    slot = torch.arange(slots, device=positions.device)
    share = valid * torch.exp(-slot / weights.decay)
    count = valid.sum((0, 1)).clamp_min(1)
    return Loss(
        (parts * share).sum() / share.sum(),
        (chance * valid).sum((0, 1)) / count,
        ((logits.argmax(-1) == labels) & valid).sum((0, 1)) / count,
        (unsure.detach() * share).sum() / share.sum(),
    )
