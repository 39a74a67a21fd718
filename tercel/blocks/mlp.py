"""The dense MLP and the latent mixture of experts, up to what the ranks have to add up."""

from dataclasses import replace

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.model import ModelConfig
from tercel.core.parameters import ExpertWeights, MlpWeights, MoeWeights
from tercel.core.rank import ExpertPart, Rank


def mlp(k: SiteTable, w: MlpWeights, x: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """x [T, N] -> the activation [T, I] of this rank's columns, before the down projection."""
    return k.glu(  # type: ignore[no-any-return]
        x,
        w.gate_up,
        activation=model.hidden_act,
        beta=model.situ_beta,
        linear_beta=model.situ_linear_beta,
    )


def moe(
    k: SiteTable, w: MoeWeights, x: torch.Tensor, place: Rank
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x [T, N] -> (routed, shared [T, I]): this rank's parts [T, L] of the routed sum (usually
    one), before the reduction and the latent norm, and its columns of the shared experts'
    activation."""
    model = place.model
    ids, weights = k.route(
        k.router(x, w.router),
        w.router_bias,
        top_k=model.num_experts_per_token,
        scaling=model.routed_scaling_factor,
        renormalize=model.moe_renormalize,
    )
    # Between routing and the experts that it chooses, so that these may read ids before they wait:
    # the activation waits before it lets the next launch start.
    shared = mlp(k, w.shared, x, model)
    latent = x if w.down is None else k.latent_down(x, w.down)
    routed = []
    for part in place.expert_parts:
        experts = w.experts if len(place.expert_parts) == 1 else _part_of(w.experts, part)
        routed.append(
            k.experts(
                latent,
                ids,
                weights,
                experts.w13,
                experts.w13_scale,
                experts.w2,
                experts.w2_scale,
                experts.w13_scale_2,
                experts.w2_scale_2,
                first_expert=part.first_expert,
                activation=model.hidden_act,
                beta=model.situ_beta,
                linear_beta=model.situ_linear_beta,
            )
        )
    return routed, shared


def _part_of(w: ExpertWeights, part: ExpertPart) -> ExpertWeights:
    """Some experts at some of their width, copied: contiguous, as a rank's own would be."""
    assert w.w13_scale is None, "plain implementations pack experts as plain matrices"
    index, count = part.width
    gate_up = torch.unflatten(w.w13[part.experts], 1, (2, count, -1))[:, :, index]
    down = torch.chunk(w.w2[part.experts], count, -1)[index]
    return replace(w, w13=gate_up.flatten(1, 2).contiguous(), w2=down.contiguous())
