"""The forward of the Kimi family: K3 with attention residuals, Kimi-Linear with a plain one."""

import torch

from tercel.blocks import join
from tercel.blocks.kda import kda
from tercel.blocks.mla import mla
from tercel.blocks.mlp import mlp, moe
from tercel.blocks.sites import SiteTable
from tercel.core.cache import ModelCache
from tercel.core.group import Group
from tercel.core.inputs import StepInputs
from tercel.core.model import ModelConfig
from tercel.core.parameters import MlaWeights, ModelWeights, MoeWeights


def forward(
    k: SiteTable,
    w: ModelWeights,
    cache: ModelCache,
    step: StepInputs,
    group: Group,
    model: ModelConfig,
    first_expert: int,
) -> torch.Tensor:
    """One step of one rank. Returns the logits of the sampled rows [S, V / tp] fp32."""
    bank = w.embed.new_empty(model.num_snapshots, step.tokens.shape[0], model.hidden_size)
    x, prefix = join.embed(k, w, step.tokens, bank, model)
    for i, layer in enumerate(w.layers):
        attention = layer.attention
        if isinstance(attention, MlaWeights):
            core = mla(k, attention, x, step, cache.latent[i], model)
        else:
            core = kda(k, attention, x, step, cache.kda[i], model)
        selection = join.before_mlp(layer, i, model)
        x, prefix, _ = join.join_attention(
            k, group, attention.o_proj, core, (prefix, bank), selection, model
        )
        selection = join.after_layer(w, i, model)
        if isinstance(layer.mlp, MoeWeights):
            parts = moe(k, layer.mlp, x, model, first_expert)
            x, prefix, _ = join.join_moe(
                k, group, layer.mlp, parts, (prefix, bank), selection, model
            )
        else:
            act = mlp(k, layer.mlp, x, model)
            x, prefix, _ = join.join_mlp(k, group, layer.mlp, act, (prefix, bank), selection, model)
    return k.head(x[step.sample_rows], w.head)  # type: ignore[no-any-return]
