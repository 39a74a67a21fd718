"""Which drafts are kept, and what the token after them is drawn from: functions of probabilities.

One request: p [g + 1, V] is the target's distribution after 0 .. g drafts, q [g, V] what each draft
was drawn from. A q of zeros says that nothing was drafted there: nothing from there on is kept, and
the token is the target's own. However good the drafts are, what comes out, kept drafts and the
token after them, is distributed as the target alone would draw it.

A rejecting rule is three functions. `thresholds` [g] are what the uniform number of each draft has
to stay below, `accepted` counts the drafts kept, and `residual` [V] are the masses of the token.

Source: token rejection, Leviathan et al., arXiv 2211.17192; block verification, Sun et al., arXiv
2403.10444; DSpark, arXiv 2607.05147.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

NOTHING = 1e-12
"""A residual mass that is only rounding: p and q are equal there, and a draw from p is as good."""


class Rule(NamedTuple):
    thresholds: Callable[[torch.Tensor, torch.Tensor, list[int]], list[float]]
    accepted: Callable[[list[float], list[float]], int]
    residual: Callable[[torch.Tensor, torch.Tensor, list[int], int], torch.Tensor]


def count_matches(sampled: list[int], drafts: list[int]) -> int:
    """Sample-match: drafts are kept as far as they are what the target draws, whose own draw is
    the token. The text is that of plain decoding with the same random numbers, and needs no q."""
    return leading([draft == own for draft, own in zip(drafts, sampled, strict=False)])


def leading(kept: list[bool]) -> int:
    """How many are true before the first that is not."""
    return kept.index(False) if False in kept else len(kept)


def ratio(p: torch.Tensor, q: torch.Tensor, drafts: list[int], slot: int) -> float:
    """p / q of a draft; zero where nothing was drafted."""
    token = drafts[slot]
    return float(p[slot, token] / q[slot, token]) if q[slot, token] > 0 else 0.0


def rest(p: torch.Tensor, q: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """What scale * p has over q; p where that is nothing."""
    over = (scale * p - q).clamp_min(0)
    return over if over.sum() > NOTHING else p


def token_thresholds(p: torch.Tensor, q: torch.Tensor, drafts: list[int]) -> list[float]:
    return [min(1.0, ratio(p, q, drafts, slot)) for slot in range(len(drafts))]


def token_accepted(thresholds: list[float], u: list[float]) -> int:
    return leading([x < threshold for x, threshold in zip(u, thresholds, strict=True)])


def token_residual(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], accepted: int
) -> torch.Tensor:
    return p[accepted] if accepted == len(drafts) else rest(p[accepted], q[accepted])


def shares(p: torch.Tensor, q: torch.Tensor, drafts: list[int]) -> list[float]:
    """P_0 .. P_g: the most that the drafts so far may be kept with, as a block."""
    result = [1.0]
    for slot in range(len(drafts)):
        result.append(min(1.0, result[-1] * ratio(p, q, drafts, slot)))
    return result


def block_thresholds(p: torch.Tensor, q: torch.Tensor, drafts: list[int]) -> list[float]:
    """h_i = S_i / (S_i + 1 - P_i) with S_i = sum max(P_i p - q, 0) after i drafts, and h_g = P_g.
    Where P_i is 1 the i drafts are kept for certain, S_i being 0 or not."""
    block = shares(p, q, drafts)
    result = []
    for kept in range(1, len(drafts)):
        over = float((block[kept] * p[kept] - q[kept]).clamp_min(0).sum())
        result.append(1.0 if block[kept] == 1 else over / (over + 1 - block[kept]))
    return result + block[-1:] if drafts else []


def block_accepted(thresholds: list[float], u: list[float]) -> int:
    """The longest block that its number allows, whatever shorter ones' say."""
    kept = [i + 1 for i, (x, h) in enumerate(zip(u, thresholds, strict=True)) if x < h]
    return max(kept, default=0)


def block_residual(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], accepted: int
) -> torch.Tensor:
    if accepted == len(drafts):
        return p[accepted]
    return rest(p[accepted], q[accepted], shares(p, q, drafts)[accepted])


RULES: Mapping[str, Rule] = {
    "token": Rule(token_thresholds, token_accepted, token_residual),
    "block": Rule(block_thresholds, block_accepted, block_residual),
}
