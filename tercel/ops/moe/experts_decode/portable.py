"""Gathers the chosen experts while they are few, else runs every expert on every token.

Matrices stand on the left and rows are transposed from memory order: a CPU's batched product of few
rows is up to ten times slower in the other arrangements.
"""

import torch

from tercel.ops._lib.activation import activate
from tercel.ops._lib.experts import combine, local_experts, pack


def experts_decode(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    ids_early: bool = False,
) -> torch.Tensor:
    w13, _, w2, *_ = pack(w13, w13_scale, w2, w2_scale, w13_scale_2, w2_scale_2, dtype=z.dtype)
    tokens, slots = ids.shape
    experts, latent, width = w2.shape
    index, shares = local_experts(ids, weights, first_expert, experts)
    if tokens * slots <= 2 * experts:
        flat = index.view(-1)
        chosen = w13.index_select(0, flat).view(tokens, slots * 2 * width, latent)
        hidden = torch.bmm(chosen, z.unsqueeze(1).mT).view(tokens * slots, 1, 2 * width)
        activated = activate(hidden, activation, beta, linear_beta)
        outputs = torch.bmm(w2.index_select(0, flat), activated.mT)
    else:
        hidden = torch.bmm(w13, z.t().expand(experts, -1, -1)).mT
        activated = activate(hidden, activation, beta, linear_beta)
        row = torch.arange(tokens, device=z.device).unsqueeze(1)
        outputs = torch.bmm(w2, activated.mT).mT[index, row]
    return combine(outputs.view(tokens, slots, latent), shares)
