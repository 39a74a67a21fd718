"""The places where a forward calls an op, and the signature that serves each.

A block never chooses a kernel: it calls k.<site>(...). Which op and implementation stand behind a
site is decided per step class when a program is resolved.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tercel.contract import Op
from tercel.core.step import StepClass
from tercel.ops.attention.mla_append import mla_append
from tercel.ops.attention.mla_decode import mla_decode
from tercel.ops.attention.mla_prefill import mla_prefill
from tercel.ops.attention.mla_query_append import mla_query_append
from tercel.ops.gemm.embedding import embedding
from tercel.ops.gemm.gemv import gemv
from tercel.ops.gemm.gemv_glu import gemv_glu
from tercel.ops.gemm.linear import linear
from tercel.ops.gemm.linear_f32 import linear_f32
from tercel.ops.gemm.linear_glu import linear_glu
from tercel.ops.gemm.lm_head import lm_head
from tercel.ops.linear_attention.causal_conv1d import causal_conv1d
from tercel.ops.linear_attention.kda_decode import kda_decode
from tercel.ops.linear_attention.kda_gate import kda_gate
from tercel.ops.linear_attention.kda_prefill import kda_prefill
from tercel.ops.linear_attention.kda_verify import kda_verify
from tercel.ops.moe.experts_decode import experts_decode
from tercel.ops.moe.experts_grouped import experts_grouped
from tercel.ops.moe.route import route
from tercel.ops.norm.add_attn_res_rms_norm import add_attn_res_rms_norm
from tercel.ops.norm.add_rms_norm import add_rms_norm
from tercel.ops.norm.embed_rms_norm import embed_rms_norm
from tercel.ops.norm.gated_rms_norm import gated_rms_norm
from tercel.ops.norm.rms_norm import rms_norm

Sites = Mapping[str, Op[..., Any]]
"""Site name to op."""

SiteTable = SimpleNamespace
"""What a block receives as k: one bound callable per site."""

SITES: Sites = {
    "embed": embed_rms_norm,
    "embedding": embedding,
    "input_norm": rms_norm,
    "kda_proj": linear,
    "kda_f_b": linear,
    "kda_g_b": linear,
    "kda_conv": causal_conv1d,
    "kda_gate": kda_gate,
    "kda_prefill": kda_prefill,
    "kda_out_norm": gated_rms_norm,
    "kda_decode": kda_decode,
    "kda_verify": kda_verify,
    "mla_proj": linear,
    "mla_append": mla_append,
    "mla_q_norm": rms_norm,
    "mla_q_b": linear,
    "mla_prefill": mla_prefill,
    "mla_query_append": mla_query_append,
    "mla_decode": mla_decode,
    "o_proj": linear,
    "glu": linear_glu,
    "down": linear,
    "router": linear_f32,
    "route": route,
    "latent_down": linear,
    "experts": experts_grouped,
    "latent_norm": rms_norm,
    "latent_up": linear,
    "attn_res": add_attn_res_rms_norm,
    "add_norm": add_rms_norm,
    "head": lm_head,
}

_FEW_ROWS: Mapping[Op[..., Any], Op[..., Any]] = {linear: gemv, linear_glu: gemv_glu}


def for_few_rows(sites: Sites) -> Sites:
    """The same with linear ops in their forms for as few rows as a decode step has."""
    return {site: _FEW_ROWS.get(op, op) for site, op in sites.items()}


WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "kda_proj": ("KdaWeights.proj",),
    "kda_f_b": ("KdaWeights.f_b",),
    "kda_g_b": ("KdaWeights.g_b",),
    "mla_proj": ("MlaWeights.proj",),
    "mla_q_b": ("MlaWeights.q_b",),
    "o_proj": ("KdaWeights.o_proj", "MlaWeights.o_proj"),
    "glu": ("MlpWeights.gate_up",),
    "down": ("MlpWeights.down",),
    "router": ("MoeWeights.router",),
    "latent_down": ("MoeWeights.down",),
    "experts": ("MoeWeights.experts",),
    "latent_up": ("MoeWeights.up",),
    "head": ("ModelWeights.head",),
}
"""Site to the fields of core/parameters.py that an implementation of it may want packed."""


def sites(step_class: StepClass) -> Sites:
    """The op behind each site in steps of `step_class`: decode steps have forms of their own."""
    few_tokens = step_class in (StepClass.DECODE, StepClass.VERIFY)
    return {**for_few_rows(SITES), "experts": experts_decode} if few_tokens else SITES


def table(bound: Mapping[str, Callable[..., Any]]) -> SiteTable:
    return SimpleNamespace(**bound)
