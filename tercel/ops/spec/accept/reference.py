"""Request by request, by the rules as they are written down."""

import torch

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops.sampling.sample.reference import draw, keep, uniform
from tercel.ops.spec.accept.rules import RULES, count_matches

NO_TOKEN = -1


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
    whole = group.all_gather(logits.double(), dim=-1)
    blocks = whole.view(requests, slots + 1, -1)
    proposals = torch.zeros_like(blocks[:, 1:])
    if draft_logits is not None:
        proposals = group.all_gather(draft_logits.double(), dim=-1).view_as(proposals)
    tokens, accepted, finite = [], [], []
    for r in range(requests):
        count = int(num_drafts[r])
        kept, own = drafts[r, :count].tolist(), blocks[r, : count + 1]
        filters = int(top_k[r]), float(top_p[r]), float(min_p[r])
        p = _probabilities(own, float(temperature[r]), *filters)
        seed, position = int(seeds[r]), int(positions[r])
        if rule == "match":
            drawn = [
                draw(row, uniform(seed, position + 1 + j, Stream.TARGET)) if row.any() else NO_TOKEN
                for j, row in enumerate(p)
            ]
            number = count_matches(drawn, kept)
            token = drawn[number]
        else:
            chosen = RULES[rule]
            one_hot = draft_logits is None or temperature[r] == 0
            q = torch.zeros_like(own[:count])
            q[range(count), kept] = 1.0
            if not one_hot:
                q = torch.softmax(proposals[r, :count] / temperature[r], -1)
            numbers = [uniform(seed, position, Stream.ACCEPT + j) for j in range(count)]
            number = chosen.accepted(chosen.thresholds(p, q, kept), numbers)
            residual = chosen.residual(p, q, kept, number)
            u = uniform(seed, position, Stream.RESIDUAL)
            if not count:
                u = uniform(seed, position + 1, Stream.TARGET)
            token = draw(residual, u) if residual.any() else NO_TOKEN
        tokens.append(kept[:number] + [max(token, 0)] * (slots + 1 - number))
        accepted.append(number)
        finite.append(bool(p[: number + 1].any(-1).all()))
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device).view(requests, slots + 1),
        torch.tensor(accepted, dtype=torch.int64, device=device),
        torch.tensor(finite, dtype=torch.bool, device=device),
    )


def _probabilities(rows: torch.Tensor, heat: float, k: int, p: float, m: float) -> torch.Tensor:
    """[g + 1, V] the target's distributions; a row of zeros where the logits are not finite."""
    result = torch.zeros_like(rows)
    for row, out in zip(rows, result, strict=True):
        if bool(row.isnan().any()) or not bool(row.max().isfinite()):
            continue
        if heat == 0:
            out[int(row.argmax())] = 1.0
        else:
            kept = keep(torch.softmax(row / heat, 0), k, p, m)
            out.copy_(kept / kept.sum())
    return result
