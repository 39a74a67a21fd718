"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.core.group import Group
from tercel.ops.spec.markov_chain import portable as fast
from tercel.ops.spec.markov_chain import reference as naive
from tercel.ops.spec.markov_chain.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.markov_chain),
    portable(fast.markov_chain),
    kernel("triton", naive.markov_chain),
)
def markov_chain(
    base: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    group: Group,
    num_drafts: int,
    greedy: bool = False,
    board: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts of a block and the logits that they were chosen from.

    Args:
        base: [R * G, V] fp32, the target's head on the block's rows, this rank's vocabulary; -inf
            bars a token.
        anchors: [R] i64 tokens before the first draft.
        w1: [VOCABULARY, D] act, all of it on every rank; None: no Markov head.
        w2: [V, D] act, this rank's rows; None with w1.
        temperature: [R] fp32; 0 takes the largest, ties to the lower id.
        seeds: [R] i64, the requests' seeds.
        positions: [R] i64 of the anchors.
        group: the ranks that hold the vocabulary, in order; the only way anything is exchanged,
            a pair per request and slot.
        num_drafts: G.
        greedy: whether every temperature is 0; True draws no noise.
        board: [BOARD] i64 zeros, left zero, that no other call uses meanwhile: kernels take one
            launch with POSTS of them per request and draft; None, or fewer: several launches.
    Returns:
        (tokens [R, G] i64, equal on every rank; logits [R * G, V] fp32 of this rank, with the
        bias, before the temperature), newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract, or a vocabulary that the ranks do not
            make up.
    Wrong, silently:
        a temperature with greedy=True; an anchor outside the vocabulary; ranks in different orders.
    Source: DSpark, arXiv 2607.05147.
    """
