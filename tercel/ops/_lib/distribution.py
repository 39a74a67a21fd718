"""What a row of logits draws from, for all rows at once and without reading a value on the host.

Filters become one threshold per row, so that a row that does not filter draws from the same masses,
in the same id order, whether or not its neighbours do.
"""

from typing import Any

import torch

from tercel.core.group import Group
from tercel.errors import ContractError


def check_parameters(
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    positions: torch.Tensor,
    filtered: bool,
    greedy: bool,
    **_: Any,
) -> None:
    """Raises ContractError for a row's parameter out of range, or for one that a flag denies."""
    checks = {
        "temperature: must be 0 or more": temperature >= 0,
        "top_k: must be 0 or more": top_k >= 0,
        "top_p: must be above 0, at most 1": (top_p > 0) & (top_p <= 1),
        "min_p: must be 0 to 1": (min_p >= 0) & (min_p <= 1),
        "positions: must be 0 or more": positions >= 0,
        "filtered: False, but a row filters": (
            torch.tensor(filtered) | ((top_k == 0) & (top_p == 1) & (min_p == 0))
        ),
        "greedy: True, but a row has a temperature": ~torch.tensor(greedy) | (temperature == 0),
    }
    for problem, good in checks.items():
        if not bool(good.all()):
            raise ContractError(problem)


def masses(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    filtered: bool,
) -> torch.Tensor:
    """[S, V] fp64: exp(logits / temperature) over that of the row's `largest`, zero where a filter
    drops the token. A row of temperature 0 is taken at temperature 1 and means nothing."""
    heat = temperature.double().masked_fill(temperature == 0, 1.0).unsqueeze(1)
    # Relative to the largest, which is 1: the sum over the vocabulary cannot overflow.
    kept = logits.double().sub_(largest.unsqueeze(1)).div_(heat).exp_()
    if filtered:
        kept.masked_fill_(kept < _threshold(kept, top_k, top_p, min_p), 0.0)
    return kept


def draw(kept: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[S]: the first id whose cumulative mass exceeds u [S] of the row's whole."""
    cumulative = kept.cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def argmax_over_ranks(values: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, its id), both [S], over a vocabulary whose parts [S, V] lie on the ranks in order;
    ties go to the lower id. One exchange of a value and an id per row, equal on every rank."""
    largest, ids = values.max(-1)
    if group.world_size == 1:
        return largest, ids
    pair = torch.stack((largest.double(), (ids + group.rank * values.shape[1]).double()))
    largest_of, ids_of = group.all_gather(pair.unsqueeze(-1), dim=-1)
    best, rank = largest_of.max(-1)
    return best.to(values.dtype), ids_of.gather(1, rank.unsqueeze(1)).squeeze(1).long()


def _threshold(
    kept: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[S, 1]: the smallest mass that passes a row's filters; the largest mass of a row is 1."""
    vocabulary = kept.shape[1]
    descending = kept.sort(-1, descending=True).values
    last = torch.where(top_k == 0, vocabulary, top_k).clamp_max_(vocabulary).sub_(1)
    top_k_mass = descending.gather(1, last.unsqueeze(1))
    kept = descending.masked_fill(descending < top_k_mass, 0.0)
    cumulative = kept.cumsum(-1)
    share = top_p.double().unsqueeze(1)
    outside = cumulative - kept >= share * cumulative[:, -1:]
    top_p_mass = kept.masked_fill(outside, 1.0).amin(-1, keepdim=True)
    top_p_mass.masked_fill_(share >= 1.0, 0.0)
    return torch.maximum(torch.maximum(top_k_mass, top_p_mass), min_p.double().unsqueeze(1))
