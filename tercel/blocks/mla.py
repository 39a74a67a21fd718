"""Multi-head latent attention without positions: the gated core before o_proj out."""

from dataclasses import dataclass

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.cache import LatentCache
from tercel.core.inputs import PrefillInputs, StepInputs, VerifyInputs
from tercel.core.model import ModelConfig
from tercel.core.parameters import MlaWeights


@dataclass(frozen=True)
class _Projected:
    q: torch.Tensor
    """[T, Q] query latent, or the whole query where the model has none."""
    latent: torch.Tensor
    """[T, R + D] raw."""
    gate: torch.Tensor | None
    """[T, H * V] after the sigmoid."""

    def rows(self, part: slice) -> "_Projected":
        gate = None if self.gate is None else self.gate[part]
        return _Projected(self.q[part], self.latent[part], gate)


def mla(
    k: SiteTable,
    w: MlaWeights,
    x: torch.Tensor,
    step: StepInputs,
    cache: LatentCache,
    model: ModelConfig,
) -> torch.Tensor:
    """x [T, N] -> the gated core [T, H * V] of this rank's heads."""
    projected = _project(k, w, x, cache.pages.shape[-1])
    split = step.num_prefill_tokens
    cores = []
    if step.prefill is not None:
        rows, where = projected.rows(slice(0, split)), step.slot_mapping[:split]
        cores.append(_prefill(k, w, rows, step.prefill, where, cache, model))
    if step.verify is not None:
        rows, where = projected.rows(slice(split, None)), step.slot_mapping[split:]
        cores.append(_verify(k, w, rows, step.verify, where, cache, model))
    return cores[0] if len(cores) == 1 else torch.cat(cores)


def _project(k: SiteTable, w: MlaWeights, x: torch.Tensor, latent_dim: int) -> _Projected:
    heads, nope, rank = w.w_k.shape
    q_size = heads * (nope + latent_dim - rank) if w.q_norm is None else w.q_norm.shape[0]
    ungated = q_size + latent_dim
    if w.proj.shape[0] == ungated:
        proj = k.mla_proj(x, w.proj)
        return _Projected(proj[:, :q_size], proj[:, q_size:], None)
    proj = k.mla_proj(x, w.proj, sigmoid_from=ungated)
    return _Projected(proj[:, :q_size], proj[:, q_size:ungated], proj[:, ungated:])


def _prefill(
    k: SiteTable,
    w: MlaWeights,
    rows: _Projected,
    step: PrefillInputs,
    slot_mapping: torch.Tensor,
    cache: LatentCache,
    model: ModelConfig,
) -> torch.Tensor:
    k.mla_append(
        rows.latent,
        w.kv_norm,
        cache.pages,
        slot_mapping,
        eps=model.latent_norm_eps,
        page_scale=cache.page_scale,
    )
    q = rows.q
    if w.q_norm is not None:
        q = k.mla_q_b(k.mla_q_norm(q, w.q_norm, eps=model.latent_norm_eps), w.q_b)
    return k.mla_prefill(  # type: ignore[no-any-return]
        q.reshape(q.shape[0], w.w_k.shape[0], -1),
        cache.pages,
        step.block_table,
        w.w_k,
        w.w_v,
        rows.gate,
        cu_seqlens=step.cu_seqlens,
        context_lens=step.context_lens,
        scale=model.qk_head_dim**-0.5,
        page_scale=cache.page_scale,
    )


def _verify(
    k: SiteTable,
    w: MlaWeights,
    rows: _Projected,
    step: VerifyInputs,
    slot_mapping: torch.Tensor,
    cache: LatentCache,
    model: ModelConfig,
) -> torch.Tensor:
    query = k.mla_query_append(
        rows.q,
        w.q_norm,
        w.q_b,
        rows.latent,
        w.kv_norm,
        w.w_k,
        cache.pages,
        slot_mapping,
        q_eps=model.latent_norm_eps,
        eps=model.latent_norm_eps,
        page_scale=cache.page_scale,
    )
    return k.mla_decode(  # type: ignore[no-any-return]
        query,
        cache.pages,
        step.block_table,
        step.context_lens,
        w.w_v,
        rows.gate,
        width=step.width,
        scale=model.qk_head_dim**-0.5,
        page_scale=cache.page_scale,
    )
