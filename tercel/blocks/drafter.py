"""A drafter: context rows written from the target's taps, and a block of guesses drafted.

What it computes is tercel/reference/drafter.py. Context rows are made for every token that the
target runs; a block is run for each request once its anchor is known. Both take lengths, tables and
tokens from device tensors only.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.blocks.sites import SiteTable, for_few_rows
from tercel.contract import Op
from tercel.core.cache import DrafterCache
from tercel.core.drafter import DrafterConfig, GqaShape, MlaShape
from tercel.core.drafter_parameters import DrafterLayerWeights, DrafterWeights, GqaWeights
from tercel.core.drafting import Block, DraftSampling
from tercel.core.group import Group
from tercel.core.parameters import MlaWeights
from tercel.ops.attention.block_attention import block_attention
from tercel.ops.attention.block_attention_qk_norm_rope import block_attention_qk_norm_rope
from tercel.ops.attention.mla_query_rope import mla_query_rope
from tercel.ops.gemm.embedding import embedding
from tercel.ops.gemm.head_linear import head_linear
from tercel.ops.gemm.linear import linear
from tercel.ops.gemm.linear_f32 import linear_f32
from tercel.ops.gemm.linear_glu import linear_glu
from tercel.ops.gemm.lm_head import lm_head
from tercel.ops.norm.add_rms_norm import add_rms_norm
from tercel.ops.norm.embed_rms_norm import embed_rms_norm
from tercel.ops.norm.rms_norm import rms_norm
from tercel.ops.spec.context_kv import context_kv
from tercel.ops.spec.context_latent import context_latent
from tercel.ops.spec.markov_chain import markov_chain

SITES: Mapping[str, Op[..., Any]] = {
    "tap_norm": rms_norm,
    "context_fc": linear,
    "context_norm": rms_norm,
    "context_kv": context_kv,
    "context_latent": context_latent,
    "embed": embed_rms_norm,
    "embedding": embedding,
    "embed_norm": rms_norm,
    "proj": linear,
    "attention": block_attention_qk_norm_rope,
    "mla_query": mla_query_rope,
    "mla_attention": block_attention,
    "mla_value": head_linear,
    "o_proj": linear,
    "add_norm": add_rms_norm,
    "glu": linear_glu,
    "down": linear,
    "head": lm_head,
    "markov_chain": markov_chain,
    "confidence": linear_f32,
}
"""Site to op, for tercel.blocks.sites.table."""

FEW_ROWS = for_few_rows(SITES)
"""The same for as few rows as gemv serves."""


def write_context(
    k: SiteTable,
    group: Group,
    w: DrafterWeights,
    config: DrafterConfig,
    taps: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: DrafterCache,
    counters: torch.Tensor | None = None,
) -> None:
    """taps [T, taps * M] of tokens at `positions` [T] into their pages, for all layers; `counters`
    as of context_kv."""
    c, eps = w.context, config.rms_norm_eps
    if c.tap_norm is not None:
        parts = taps.chunk(len(config.taps), -1)
        normed = [k.tap_norm(x, norm, eps=eps) for x, norm in zip(parts, c.tap_norm, strict=True)]
        taps = torch.cat(normed, -1)
    width = c.fc.shape[1]
    own = taps[:, group.rank * width : (group.rank + 1) * width]
    rows = k.context_norm(group.all_reduce(k.context_fc(own, c.fc)), c.norm, eps=eps)
    given = (rows, c.kv, c.kv_norm, w.inv_freq, positions, cache.pages, slot_mapping)
    if isinstance(config.attention, GqaShape):
        k.context_kv(*given, eps=eps, **_turn(config), counters=counters)
    else:
        k.context_latent(*given, eps=eps, **_turn(config))


def run_block(
    k: SiteTable,
    group: Group,
    w: DrafterWeights,
    config: DrafterConfig,
    embed: torch.Tensor,
    block: Block,
    cache: DrafterCache,
) -> torch.Tensor:
    """[R * g, N] the normed hidden rows of the guesses; `embed` is this rank's part of the
    target's table."""
    eps, width = config.rms_norm_eps, config.width(block.num_drafts)
    x, h = _embed(k, group, w, config, embed, block.anchors, width)
    following = [layer.input_norm for layer in w.layers[1:]]
    for index, (layer, norm) in enumerate(zip(w.layers, (*following, w.norm), strict=True)):
        core = _attention(k, w, config, index, x, block, cache.pages[index])
        reduced = group.all_reduce(k.o_proj(core, layer.attention.o_proj))
        x, h = k.add_norm(reduced, h, layer.post_attention_norm, eps=eps)
        activation = k.glu(x, layer.mlp.gate_up, activation="silu", beta=None, linear_beta=None)
        reduced = group.all_reduce(k.down(activation, layer.mlp.down))
        x, h = k.add_norm(reduced, h, norm, eps=eps)
    if config.anchor_predicts:
        return x
    slots = x.view(-1, width, x.shape[1])[:, 1:]
    return slots.reshape(-1, x.shape[1])


def draft(
    k: SiteTable,
    group: Group,
    w: DrafterWeights,
    hidden: torch.Tensor,
    head: torch.Tensor,
    block: Block,
    sampling: DraftSampling,
    board: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [R * g, N] -> (tokens [R, g], what they were chosen from [R * g, V] f32 of this
    rank); `head` is this rank's part of the target's, `board` as of markov_chain."""
    markov = w.markov
    return k.markov_chain(  # type: ignore[no-any-return]
        k.head(hidden, head),
        block.anchors,
        None if markov is None else markov.w1,
        None if markov is None else markov.w2,
        sampling.temperature,
        sampling.seeds,
        block.context_lens,
        group=group,
        num_drafts=block.num_drafts,
        greedy=sampling.greedy,
        board=board,
    )


def confidence(
    k: SiteTable, w: DrafterWeights, hidden: torch.Tensor, block: Block, tokens: torch.Tensor
) -> torch.Tensor:
    """[R, g] f32 logits of the chance that each guess is kept if those before it are."""
    head = w.confidence
    assert head is not None, "the drafter has a confidence head"
    if w.markov is not None and head.proj.shape[1] > hidden.shape[1]:
        previous = torch.cat((block.anchors.unsqueeze(1), tokens[:, :-1]), 1).flatten()
        hidden = torch.cat((hidden, w.markov.w1[previous]), -1)
    logits = k.confidence(hidden, head.proj) + head.bias
    return logits.view(tokens.shape)  # type: ignore[no-any-return]


def _turn(config: DrafterConfig) -> dict[str, Any]:
    return {"rope_scale": config.rope.scale, "interleaved": config.rope.interleaved}


def _embed(
    k: SiteTable,
    group: Group,
    w: DrafterWeights,
    config: DrafterConfig,
    embed: torch.Tensor,
    anchors: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, embedding) [R * W, N]: every block is an anchor and the same mask rows."""
    table, norm, eps = (
        embed if w.embed is None else w.embed,
        w.layers[0].input_norm,
        config.rms_norm_eps,
    )
    tokens = anchors.new_full((anchors.shape[0], width), config.mask_token_id)
    tokens[:, 0] = anchors
    if group.world_size == 1 and w.mask_row is None:
        return k.embed(tokens.flatten(), table, norm, eps=eps)  # type: ignore[no-any-return]
    # One rank has a token's row, the others add zeros: the sum is exact.
    first_id = group.rank * table.shape[0]
    rows = group.all_reduce(k.embedding(tokens.flatten(), table, first_id=first_id))
    if w.mask_row is not None:
        rows.view(*tokens.shape, -1)[:, 1:] = w.mask_row
    return k.embed_norm(rows, norm, eps=eps), rows


def _attention(
    k: SiteTable,
    w: DrafterWeights,
    config: DrafterConfig,
    index: int,
    x: torch.Tensor,
    block: Block,
    pages: torch.Tensor,
) -> torch.Tensor:
    """x [R * W, N] -> the core [R * W, H * value channels] of layer `index`."""
    layer, shape = w.layers[index], config.attention
    seen = {
        "width": config.width(block.num_drafts),
        "scale": config.softmax_scale,
        "window": config.windows[index],
        "window_from_anchor": config.window_from_anchor,
        "causal": config.causal[index],
    }
    if isinstance(shape, GqaShape):
        return _gqa(k, w, config, layer, x, block, pages, seen)
    return _mla(k, w, config, layer, x, block, pages, seen)


def _gqa(
    k: SiteTable,
    w: DrafterWeights,
    config: DrafterConfig,
    layer: DrafterLayerWeights,
    x: torch.Tensor,
    block: Block,
    pages: torch.Tensor,
    seen: Mapping[str, Any],
) -> torch.Tensor:
    a = layer.attention
    assert isinstance(a, GqaWeights)
    kv_heads = pages.shape[3]
    return k.attention(  # type: ignore[no-any-return]
        k.proj(x, a.qkv),
        a.q_norm,
        a.k_norm,
        w.inv_freq,
        pages[:, :, 0],
        pages[:, :, 1],
        block.block_table,
        block.context_lens,
        heads=a.o_proj.shape[1] // pages.shape[4],
        kv_heads=kv_heads,
        eps=config.rms_norm_eps,
        **_turn(config),
        **seen,
    )


def _mla(
    k: SiteTable,
    w: DrafterWeights,
    config: DrafterConfig,
    layer: DrafterLayerWeights,
    x: torch.Tensor,
    block: Block,
    pages: torch.Tensor,
    seen: Mapping[str, Any],
) -> torch.Tensor:
    a, shape = layer.attention, config.attention
    assert isinstance(a, MlaWeights) and isinstance(shape, MlaShape)
    projected = k.proj(x, a.proj)
    slots = torch.arange(seen["width"], device=x.device)
    query, entry = k.mla_query(
        projected[:, : shape.q_lora_rank],
        a.q_norm,
        a.q_b,
        projected[:, shape.q_lora_rank :],
        a.kv_norm,
        a.w_k,
        w.inv_freq,
        (block.context_lens.unsqueeze(1) + slots).flatten(),
        eps=config.rms_norm_eps,
        **_turn(config),
    )
    mixed = k.mla_attention(
        query,
        entry.unsqueeze(1),
        None,
        pages.unsqueeze(2),
        None,
        block.block_table,
        block.context_lens,
        v_dim=shape.kv_lora_rank,
        **seen,
    )
    return k.mla_value(mixed, a.w_v)  # type: ignore[no-any-return]
