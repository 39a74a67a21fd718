"""The forward of the Kimi family: K3 with attention residuals, Kimi-Linear with a plain one."""

import torch

from tercel.blocks import join, pipeline
from tercel.blocks.kda import kda
from tercel.blocks.mla import mla
from tercel.blocks.mlp import mlp, moe
from tercel.blocks.sites import SiteTable
from tercel.core.cache import ModelCache
from tercel.core.drafting import Taps
from tercel.core.group import Groups
from tercel.core.inputs import StepInputs
from tercel.core.parameters import MlaWeights, ModelWeights, MoeWeights
from tercel.core.rank import Rank


def forward(
    k: SiteTable,
    w: ModelWeights,
    cache: ModelCache,
    step: StepInputs,
    groups: Groups,
    place: Rank,
    taps: Taps | None = None,
) -> torch.Tensor | None:
    """One step of one rank. Returns the logits of the sampled rows [S, V / tp] fp32 on the last
    pipeline stage, None on the others."""
    model, group = place.model, groups.tp
    norm = w.layers[0].input_norm
    bank = norm.new_empty(model.num_snapshots, step.tokens.shape[0], model.hidden_size)
    if place.is_first_stage:
        x, prefix = join.embed(k, group, w, step.tokens, bank, place)
    else:
        received = pipeline.receive(groups.world, place, bank, taps)
        x, prefix = join.start_stage(k, w, received, bank, place, taps)
    for i, layer in zip(place.layers, w.layers, strict=True):
        attention = layer.attention
        if isinstance(attention, MlaWeights):
            core = mla(k, attention, x, step, cache.latent[i], model)
        else:
            core = kda(k, attention, x, step, cache.kda[i], model)
        before_mlp = join.before_mlp(layer, i, model)
        x, prefix, _ = join.join_attention(
            k, group, attention.o_proj, core, (prefix, bank), before_mlp, place
        )
        selection = join.after_layer(w, i, place)
        if isinstance(layer.mlp, MoeWeights):
            parts = moe(k, layer.mlp, x, place)
            x, prefix, mixture = join.join_moe(
                k, group, layer.mlp, parts, (prefix, bank), selection, place
            )
        else:
            act = mlp(k, layer.mlp, x, model)
            x, prefix, mixture = join.join_mlp(
                k, group, layer.mlp, act, (prefix, bank), selection, place
            )
        if taps is not None:
            taps.capture(i, mixture, join.summed(prefix, bank, selection))
    if place.is_last_stage:
        return k.head(x[step.sample_rows], w.head)  # type: ignore[no-any-return]
    pipeline.send(groups.world, place, x, bank, taps)
    return None
