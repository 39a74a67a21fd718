"""All requests at once, nothing read on the host."""

import torch

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.distribution import argmax_over_ranks, draw, masses
from tercel.ops._lib.philox import uniform
from tercel.ops.spec.accept.rules import NOTHING


def accept(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    num_drafts: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    group: Group,
    rule: str,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, slots = drafts.shape
    drafted = torch.arange(slots, device=drafts.device) < num_drafts.unsqueeze(1)
    if greedy:
        largest, own = argmax_over_ranks(logits, group)
        return _match(own, largest.isfinite(), drafts, drafted)
    logits = group.all_gather(logits, dim=-1)
    largest, own = logits.max(-1)
    finite = largest.isfinite()

    def each(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(slots + 1)

    heat = each(temperature)
    filters = each(top_k), each(top_p), each(min_p)
    p = masses(logits, largest, heat, *filters, filtered=filtered)
    if rule == "match":
        after = torch.arange(1, slots + 2, device=drafts.device)
        where = (positions.unsqueeze(1) + after).flatten()
        drawn = draw(p, uniform(each(seeds), where, Stream.TARGET))
        return _match(torch.where(heat == 0, own, drawn), finite, drafts, drafted)
    still = (heat == 0).unsqueeze(1)
    p = torch.where(still, _one_hot(own, p.shape[1]), p / p.sum(-1, keepdim=True))
    p = p.masked_fill(~finite.unsqueeze(1), 0.0).view(requests, slots + 1, -1)
    q = _one_hot(drafts, p.shape[2])
    if draft_logits is not None:
        proposals = group.all_gather(draft_logits, dim=-1).view_as(q).double()
        still = (temperature == 0).view(-1, 1, 1)
        hot = temperature.double().view(-1, 1, 1).masked_fill(still, 1.0)
        q = torch.where(still, q, torch.softmax(proposals / hot, -1))
    q = q.masked_fill(~drafted.unsqueeze(2), 0.0)
    plain = uniform(seeds, positions + 1, Stream.TARGET)
    last = torch.where(num_drafts == 0, plain, uniform(seeds, positions, Stream.RESIDUAL))
    return _reject(p, q, drafts, finite, seeds, positions, last, rule)


def _one_hot(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    ids = torch.arange(vocabulary, device=tokens.device)
    return (tokens.unsqueeze(-1) == ids).double()


def _match(
    own: torch.Tensor, finite: torch.Tensor, drafts: torch.Tensor, drafted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """own and finite [R * (G + 1)]."""
    requests, slots = drafts.shape
    own, finite = own.view(requests, -1), finite.view(requests, -1)
    same = (own[:, :slots] == drafts) & finite[:, :slots] & drafted
    accepted = same.long().cumprod(1).sum(1)
    token = own.masked_fill(~finite, 0).gather(1, accepted.unsqueeze(1))
    return _result(drafts, accepted, token, finite)


def _reject(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    finite: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    last: torch.Tensor,
    rule: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p [R, G + 1, V] and q [R, G, V], zeros where a row is not finite and where no draft is;
    `last` [R] is the number that the token after the kept drafts is drawn with."""
    requests, slots = drafts.shape
    index = drafts.unsqueeze(2)
    p_draft, q_draft = (x[:, :slots].gather(2, index).squeeze(2) for x in (p, q))
    ratio = (p_draft / q_draft.masked_fill(q_draft == 0, 1.0)).masked_fill(q_draft == 0, 0.0)
    stream = torch.arange(slots, device=drafts.device) + Stream.ACCEPT
    key, place = (x.repeat_interleave(slots) for x in (seeds, positions))
    u = uniform(key, place, stream.repeat(requests)).view(requests, slots)
    if rule == "token":
        scale = torch.ones_like(p[:, :, 0])
        accepted = (u < ratio.clamp_max(1.0)).long().cumprod(1).sum(1)
    else:
        scale = _shares(ratio)
        accepted = _longest(u < _block_thresholds(p, q, scale))
    here = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])
    p_here = p.gather(1, here).squeeze(1)
    q_here = torch.nn.functional.pad(q, (0, 0, 0, 1)).gather(1, here).squeeze(1)
    over = (scale.gather(1, accepted.unsqueeze(1)) * p_here - q_here).clamp_min_(0.0)
    whole = (accepted.unsqueeze(1) == slots) | (over.sum(1, keepdim=True) <= NOTHING)
    over = torch.where(whole, p_here, over)
    token = draw(over, last).unsqueeze(1)
    finite = finite.view(requests, -1)
    token = token.masked_fill(~finite.gather(1, accepted.unsqueeze(1)), 0)
    return _result(drafts, accepted, token, finite)


def _shares(ratio: torch.Tensor) -> torch.Tensor:
    """[R, G + 1] P_0 .. P_G."""
    shares = [torch.ones_like(ratio[:, 0])]
    for slot in ratio.unbind(1):
        shares.append((shares[-1] * slot).clamp_max(1.0))
    return torch.stack(shares, 1)


def _block_thresholds(p: torch.Tensor, q: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[R, G] h_1 .. h_G."""
    some = shares[:, 1:-1]
    over = (some.unsqueeze(2) * p[:, 1:-1] - q[:, 1:]).clamp_min_(0.0).sum(2)
    certain = some == 1
    inner = (over / (over + 1 - some).masked_fill(certain, 1.0)).masked_fill(certain, 1.0)
    return torch.cat((inner, shares[:, -1:]), 1)


def _longest(kept: torch.Tensor) -> torch.Tensor:
    lengths = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    return (kept * lengths).amax(1)


def _result(
    drafts: torch.Tensor, accepted: torch.Tensor, token: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token [R, 1], finite [R, G + 1]."""
    slot = torch.arange(finite.shape[1], device=drafts.device)
    count = accepted.unsqueeze(1)
    tokens = torch.where(slot < count, torch.nn.functional.pad(drafts, (0, 1)), token)
    return tokens, accepted, (finite | (slot > count)).all(1)
