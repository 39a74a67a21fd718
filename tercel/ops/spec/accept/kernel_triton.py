"""spec/accept in one launch: greedy steps in one pass, others in programs that meet.

Where a request filters, two launches before it drop what the filters drop. Ranks exchange: the
portable form serves groups of them.
"""

import torch

from tercel.core.group import Group
from tercel.ops.spec.accept import portable
from tercel.ops.spec.accept.stages.kernel_drawn import accept_drawn
from tercel.ops.spec.accept.stages.kernel_filtered import keep_filtered
from tercel.ops.spec.accept.stages.kernel_greedy import accept_greedy


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
    if group.world_size > 1:
        given = (logits, drafts, draft_logits, num_drafts, temperature, top_k, top_p, min_p)
        options = {"group": group, "rule": rule, "filtered": filtered, "greedy": greedy}
        return portable.accept(*given, seeds, positions, **options)
    requests, slots = drafts.shape
    device = logits.device
    tokens = torch.empty(requests, slots + 1, dtype=torch.int64, device=device)
    accepted = torch.empty(requests, dtype=torch.int64, device=device)
    finite = torch.empty(requests, dtype=torch.bool, device=device)
    results = tokens, accepted, finite
    if not requests:
        return results
    if greedy:
        accept_greedy(logits, drafts, num_drafts, counters, results)
        return results
    if filtered:
        logits = keep_filtered(logits, temperature, top_k, top_p, min_p, counters)
    proposals = None if rule == "match" else draft_logits
    given = (logits, drafts, proposals, num_drafts, temperature, seeds, positions)
    accept_drawn(*given, rule, counters, results)
    return results
