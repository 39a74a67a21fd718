"""Where the ranks' parts come together: project, reduce, add to the residual, select, normalise.

Each join returns (normed, prefix, mixture): the next sublayer's input, the prefix sum it belongs
to (None right after a snapshot, which is in the bank then), and the row before the norm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.drafting import Taps
from tercel.core.group import Group
from tercel.core.model import ModelConfig
from tercel.core.parameters import (
    AttnResWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from tercel.core.rank import Rank

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


def after_layer(w: ModelWeights, index: int, place: Rank) -> Selection | None:
    """The selection between a layer and the next, or the head; None where the next stage does
    it."""
    model, following = place.model, index + 1
    block = model.attn_res_block_size
    count = 0 if block is None else index // block + 1
    if following == model.num_hidden_layers:
        assert w.norm is not None, "the last stage holds the last norm"
        return Selection(w.output_res, w.norm, count, None)
    if following == place.layers.stop:
        return None
    layer = w.layers[following - place.layers.start]
    stores = following // block if block is not None and model.takes_snapshot(following) else None
    return Selection(layer.attention_res, layer.input_norm, count, stores)


def embed(
    k: SiteTable,
    group: Group,
    w: ModelWeights,
    tokens: torch.Tensor,
    bank: torch.Tensor,
    place: Rank,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [T] -> (normed, prefix). The embedding is the first snapshot, or the residual."""
    model, norm = place.model, w.layers[0].input_norm
    snapshot = bank[0] if model.num_snapshots else None
    if group.world_size == 1:
        normed, embedding = k.embed(tokens, w.embed, norm, snapshot, eps=model.rms_norm_eps)
    else:
        # One rank has a token's row, the others add zeros: the sum is exact.
        embedding = group.all_reduce(k.embedding(tokens, w.embed, first_id=place.first_token_id))
        normed = k.input_norm(embedding, norm, eps=model.rms_norm_eps)
        if snapshot is not None:
            snapshot.copy_(embedding)
    return normed, embedding if snapshot is None else None


def start_stage(
    k: SiteTable,
    w: ModelWeights,
    prefix: torch.Tensor,
    bank: torch.Tensor,
    place: Rank,
    taps: Taps | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rest of the join that the stage before began: prefix [T, N] is added up already."""
    before, eps = place.layers.start - 1, place.model.rms_norm_eps
    selection = after_layer(w, before, place)
    assert selection is not None, "a stage selects what its first layer reads"
    updated: torch.Tensor | None
    if selection.res is None:
        normed, updated, mixture = k.input_norm(prefix, selection.norm, eps=eps), prefix, prefix
    else:
        normed, updated, mixture = _select(k, prefix, (None, bank), selection, place.model)
    if taps is not None:
        taps.capture(before, mixture, prefix)
    return normed, updated


def summed(
    prefix: torch.Tensor | None, bank: torch.Tensor, selection: Selection | None
) -> torch.Tensor:
    """The prefix sum that a join made, also where it has just become a snapshot."""
    if prefix is not None:
        return prefix
    assert selection is not None and selection.stores is not None
    return bank[selection.stores]


def join_attention(
    k: SiteTable,
    group: Group,
    o_proj: torch.Tensor,
    core: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection | None,
    place: Rank,
) -> Joined:
    """core [T, heads of this rank]; stream is (prefix, bank)."""
    parts = _partial_products(k.o_proj, core, o_proj, place)
    return _select(k, group.all_reduce(*parts), stream, selection, place.model)


def join_mlp(
    k: SiteTable,
    group: Group,
    w: MlpWeights,
    activation: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection | None,
    place: Rank,
) -> Joined:
    """activation [T, I] of this rank's columns."""
    parts = _partial_products(k.down, activation, w.down, place)
    return _select(k, group.all_reduce(*parts), stream, selection, place.model)


def join_moe(
    k: SiteTable,
    group: Group,
    w: MoeWeights,
    parts: tuple[list[torch.Tensor], torch.Tensor],
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection | None,
    place: Rank,
) -> Joined:
    """parts = (routed, shared) as the moe block returns them. The latent norm is not linear, so
    the routed parts are summed over ranks before it; each rank then projects its columns up."""
    routed, shared = parts
    down = _partial_products(k.down, shared, w.shared.down, place)
    if w.up is not None:
        latent = group.all_reduce(*routed)
        if w.latent_norm is not None:
            latent = k.latent_norm(latent, w.latent_norm, eps=place.model.rms_norm_eps)
        width = w.up.shape[1]
        columns = latent[:, group.rank * width : (group.rank + 1) * width]
        routed = _partial_products(k.latent_up, columns, w.up, place)
    added = [a + b for a, b in zip(routed, down, strict=True)]
    return _select(k, group.all_reduce(*added), stream, selection, place.model)


def _partial_products(
    site: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, place: Rank
) -> list[torch.Tensor]:
    """This rank's part of x @ weight^T, whose depth the ranks divide: one product, or one for each
    rank of the layout whose sums are reproduced."""
    count = place.num_sum_parts
    if count == 1:
        return [site(x, weight)]
    rows, columns = torch.chunk(x, count, -1), torch.chunk(weight, count, 1)
    return [site(a.contiguous(), b.contiguous()) for a, b in zip(rows, columns, strict=True)]


def _select(
    k: SiteTable,
    reduced: torch.Tensor,
    stream: tuple[torch.Tensor | None, torch.Tensor],
    selection: Selection | None,
    model: ModelConfig,
) -> Joined:
    prefix, bank = stream
    eps = model.rms_norm_eps
    if selection is None:
        updated = reduced if prefix is None else prefix + reduced
        return updated, updated, updated
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
