"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.core.group import Group
from tercel.ops.spec.accept import portable as fast
from tercel.ops.spec.accept import reference as naive
from tercel.ops.spec.accept.contract import CONTRACT


@operation(CONTRACT, reference(naive.accept), portable(fast.accept), kernel("triton", naive.accept))
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
    """The drafts that are kept, and the token after them, of a verify step.

    Args:
        logits: [R * (G + 1), V] fp32 of this rank's vocabulary; row j of a request comes after j
            drafts; -inf bars a token.
        drafts: [R, G] i64.
        draft_logits: [R * G, V] fp32 that the drafts were drawn from at the request's temperature;
            None: drafts are certain of themselves. Rule match does not read them.
        num_drafts: [R] i64 drafts that count, 0 .. G. A request without any is drawn for as plain
            decoding does, so that drafts of other requests change nothing for it.
        temperature, top_k, top_p, min_p: [R], as of op sample.
        seeds: [R] i64, the requests' seeds.
        positions: [R] i64 of the anchors, the first of the step's tokens of each request.
        group: the ranks that hold the vocabulary, in order; the only way anything is exchanged.
        rule: match (plain decoding's own draws), token or block (keep more, other draws).
        filtered: whether any request has top_k, top_p or min_p; False skips the sort.
        greedy: whether every temperature is 0; True exchanges one pair per row, not the logits.
        counters: [COUNTERS] i32 zeros, left zero, that no other call uses meanwhile: kernels take
            one launch, after the filters' own, with MEETINGS per request; None, or fewer: several.
    Returns:
        (tokens [R, G + 1] i64: the kept drafts, then the token after them in every place left, so
        that the last column is the next anchor; accepted [R] i64 kept drafts, 0 .. G; finite [R]
        bool), newly allocated and equal on every rank.
    Raises:
        ContractError: a shape or dtype outside the contract, or another rule.
    Wrong, silently:
        drafts not drawn from their logits; a request that filters with filtered=False; a
        temperature with greedy=True; ranks in different orders.
    Source: DSpark, arXiv 2607.05147; token rejection, arXiv 2211.17192; block verification, arXiv
    2403.10444.
    """
