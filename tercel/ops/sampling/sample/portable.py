"""All rows at once, nothing read on the host.

Filters become one threshold per row, so that a row that does not filter draws from the same masses,
in the same id order, whether or not its neighbours do.
"""

import torch

from tercel.ops._lib.philox import uniform


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: int,
    filtered: bool,
    greedy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    largest, tokens = logits.max(-1)
    finite = largest.isfinite()  # NaN and +inf are the largest of a row; -inf is when all are
    if not greedy:
        still = temperature == 0
        heat = temperature.double().masked_fill_(still, 1.0).unsqueeze(1)
        # Relative to the largest, which is 1: the sum over the vocabulary cannot overflow.
        masses = logits.double().sub_(largest.unsqueeze(1)).div_(heat).exp_()
        if filtered:
            masses.masked_fill_(masses < _threshold(masses, top_k, top_p, min_p), 0.0)
        cumulative = masses.cumsum(-1)
        target = uniform(seeds, positions, stream).unsqueeze(1) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        tokens = torch.where(still, tokens, drawn)
    return tokens.masked_fill_(~finite, 0), finite


def _threshold(
    masses: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[S, 1]: the smallest mass that passes a row's filters; the largest mass of a row is 1."""
    vocabulary = masses.shape[1]
    descending = masses.sort(-1, descending=True).values
    last = torch.where(top_k == 0, vocabulary, top_k).clamp_max_(vocabulary).sub_(1)
    top_k_mass = descending.gather(1, last.unsqueeze(1))
    kept = descending.masked_fill(descending < top_k_mass, 0.0)
    cumulative = kept.cumsum(-1)
    share = top_p.double().unsqueeze(1)
    outside = cumulative - kept >= share * cumulative[:, -1:]
    top_p_mass = kept.masked_fill(outside, 1.0).amin(-1, keepdim=True)
    top_p_mass.masked_fill_(share >= 1.0, 0.0)
    return torch.maximum(torch.maximum(top_k_mass, top_p_mass), min_p.double().unsqueeze(1))
