"""Where the ranks' parts come together: project, reduce, add to the residual, select, normalise.

Each join returns (normed, prefix, mixture): the next sublayer's input, the prefix sum it belongs
to (None right after a snapshot), and the row before the norm, which drafters tap.
"""

from dataclasses import dataclass

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.group import Group
from tercel.core.model import ModelConfig
from tercel.core.parameters import (
    AttnResWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)

Joined = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


@dataclass(frozen=True)
class Selection:
    """What a join ends with: a choice among snapshots and prefix, then a norm."""

    res: AttnResWeights | None
    """None: the model has a plain residual."""
    norm: torch.Tensor
    num_snapshots: int
    """Bank rows that are sources."""
    stores: int | None
    """Bank row that the new prefix sum becomes; the prefix then starts anew."""


def before_mlp(layer: LayerWeights, index: int, model: ModelConfig) -> Selection:
    """The selection between a layer's attention and its MLP."""
    block = model.attn_res_block_size
    count = 0 if block is None else index // block + 1
    return Selection(layer.mlp_res, layer.post_attention_norm, count, None)


def after_layer(w: ModelWeights, index: int, model: ModelConfig) -> Selection:
    """The selection between a layer and the next, or the head."""
    block, following = model.attn_res_block_size, index + 1
    count = 0 if block is None else index // block + 1
    if following == len(w.layers):
        return Selection(w.output_res, w.norm, count, None)
    layer = w.layers[following]
    stores = following // block if block is not None and model.takes_snapshot(following) else None
    return Selection(layer.attention_res, layer.input_norm, count, stores)


def embed(
    k: SiteTable, w: ModelWeights, tokens: torch.Tensor, bank: torch.Tensor, model: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [T] -> (normed, prefix). The embedding is the first snapshot, or the residual."""
    norm = w.layers[0].input_norm
    snapshot = bank[0] if model.num_snapshots else None
    normed, embedding = k.embed(tokens, w.embed, norm, snapshot, eps=model.rms_norm_eps)
    return normed, embedding if snapshot is None else None


def join_attention(
    k: SiteTable,
    group: Group,
    o_proj: torch.Tensor,
    core: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection,
    model: ModelConfig,
) -> Joined:
    """core [T, heads of this rank]; stream is (prefix, bank)."""
    return _select(k, group.all_reduce(k.o_proj(core, o_proj)), stream, selection, model)


def join_mlp(
    k: SiteTable,
    group: Group,
    w: MlpWeights,
    activation: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection,
    model: ModelConfig,
) -> Joined:
    """activation [T, I] of this rank's columns."""
    return _select(k, group.all_reduce(k.down(activation, w.down)), stream, selection, model)


def join_moe(
    k: SiteTable,
    group: Group,
    w: MoeWeights,
    parts: tuple[torch.Tensor, torch.Tensor],
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection,
    model: ModelConfig,
) -> Joined:
    """parts = (routed, shared) as the moe block returns them. The latent norm is not linear, so
    the routed parts are summed over ranks before it; each rank then projects its columns up."""
    routed, shared = parts
    down = k.down(shared, w.shared.down)
    if w.up is not None:
        latent = group.all_reduce(routed)
        if w.latent_norm is not None:
            latent = k.latent_norm(latent, w.latent_norm, eps=model.rms_norm_eps)
        width = w.up.shape[1]
        columns = latent[:, group.rank * width : (group.rank + 1) * width]
        routed = k.latent_up(columns, w.up)
    return _select(k, group.all_reduce(routed + down), stream, selection, model)


def _select(
    k: SiteTable,
    reduced: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection,
    model: ModelConfig,
) -> Joined:
    prefix, bank = stream
    eps = model.rms_norm_eps
    if selection.res is None:
        normed, updated = k.add_norm(reduced, prefix, selection.norm, eps=eps)
        return normed, updated, updated
    normed, updated, mixture = k.attn_res(
        reduced,
        prefix,
        bank[: selection.num_snapshots],
        selection.res.norm,
        selection.res.proj,
        selection.norm,
        res_eps=eps,
        eps=eps,
    )
    if selection.stores is None:
        return normed, updated, mixture
    bank[selection.stores].copy_(updated)
    return normed, None, mixture
