"""The dense MLP and the latent mixture of experts, up to what the ranks have to add up."""

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.model import ModelConfig
from tercel.core.parameters import MlpWeights, MoeWeights


def activation(k: SiteTable, gate_up: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """[T, 2I] -> [T, I], gate rows first."""
    if model.hidden_act == "silu":
        return k.silu_mul(gate_up)  # type: ignore[no-any-return]
    return k.situ_mul(  # type: ignore[no-any-return]
        gate_up, beta=model.situ_beta, linear_beta=model.situ_linear_beta
    )


def mlp(k: SiteTable, w: MlpWeights, x: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """x [T, N] -> the activation [T, I] of this rank's columns, before the down projection."""
    return activation(k, k.gate_up(x, w.gate_up), model)


def moe(
    k: SiteTable, w: MoeWeights, x: torch.Tensor, model: ModelConfig, first_expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N] -> (routed [T, L], shared [T, I]): this rank's part of the routed sum, before the
    reduction and the latent norm, and its columns of the shared experts' activation."""
    ids, weights = k.route(
        k.router(x, w.router),
        w.router_bias,
        top_k=model.num_experts_per_token,
        scaling=model.routed_scaling_factor,
        renormalize=model.moe_renormalize,
    )
    latent = x if w.down is None else k.latent_down(x, w.down)
    experts = w.experts
    routed = k.experts(
        latent,
        ids,
        weights,
        experts.w13,
        experts.w13_scale,
        experts.w2,
        experts.w2_scale,
        experts.w13_scale_2,
        experts.w2_scale_2,
        first_expert=first_expert,
        activation=model.hidden_act,
        beta=model.situ_beta,
        linear_beta=model.situ_linear_beta,
    )
    return routed, mlp(k, w.shared, x, model)
