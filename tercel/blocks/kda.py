"""Kimi Delta Attention: projections in, the gated core before o_proj out."""

import torch

from tercel.blocks.sites import SiteTable
from tercel.core.cache import KdaCache
from tercel.core.inputs import PrefillInputs, StepInputs, VerifyInputs
from tercel.core.model import ModelConfig
from tercel.core.parameters import KdaWeights

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows of (qkv, gate, f, b) before convolution and gates."""


def kda(
    k: SiteTable,
    w: KdaWeights,
    x: torch.Tensor,
    step: StepInputs,
    cache: KdaCache,
    model: ModelConfig,
) -> torch.Tensor:
    """x [T, N] -> the gated core [T, P] of this rank's heads."""
    projected = _project(k, w, x)
    split = step.num_prefill_tokens
    cores = []
    if step.prefill is not None:
        rows = tuple(part[:split] for part in projected)
        cores.append(_prefill(k, w, rows, step.prefill, cache, model))  # type: ignore[arg-type]
    if step.verify is not None:
        rows = tuple(part[split:] for part in projected)
        cores.append(_verify(k, w, rows, step.verify, cache, model))  # type: ignore[arg-type]
    return cores[0] if len(cores) == 1 else torch.cat(cores)


def _project(k: SiteTable, w: KdaWeights, x: torch.Tensor) -> Projected:
    size, f_rank = w.f_b.shape
    gate_rows = size if w.g_b is None else f_rank
    proj = k.kda_proj(x, w.proj)
    qkv, gate, f_a, b = proj.split([3 * size, gate_rows, f_rank, w.A_log.shape[0]], dim=-1)
    if w.g_b is not None:
        gate = k.kda_g_b(gate, w.g_b)
    return qkv, gate, k.kda_f_b(f_a, w.f_b), b


def _prefill(
    k: SiteTable,
    w: KdaWeights,
    rows: Projected,
    step: PrefillInputs,
    cache: KdaCache,
    model: ModelConfig,
) -> torch.Tensor:
    qkv, gate, f, b = rows
    lengths = {
        "cu_seqlens": step.cu_seqlens,
        "fresh": tuple(length == 0 for length in step.context_lens),
    }
    qkv = k.kda_conv(qkv, w.conv, cache.conv, step.slots, **lengths)
    g = k.kda_gate(f, w.A_log, w.dt_bias, lower_bound=model.kda_gate_lower_bound)
    core = k.kda_prefill(qkv, g, b, cache.recurrent, step.slots, **lengths)
    return k.kda_out_norm(core, gate, w.o_norm, eps=model.rms_norm_eps)  # type: ignore[no-any-return]


def _verify(
    k: SiteTable,
    w: KdaWeights,
    rows: Projected,
    step: VerifyInputs,
    cache: KdaCache,
    model: ModelConfig,
) -> torch.Tensor:
    weights = (w.conv, w.A_log, w.dt_bias, w.o_norm)
    norm = {"lower_bound": model.kda_gate_lower_bound, "eps": model.rms_norm_eps}
    if cache.draft_k.shape[1] == 0:
        return k.kda_decode(  # type: ignore[no-any-return]
            *rows, *weights, cache.conv, cache.recurrent, step.slots, **norm
        )
    records = (cache.draft_k, cache.draft_v, cache.draft_g, cache.draft_beta)
    return k.kda_verify(  # type: ignore[no-any-return]
        *rows,
        *weights,
        cache.conv,
        cache.recurrent,
        *records,
        step.slots,
        step.pending,
        width=step.width,
        **norm,
    )
