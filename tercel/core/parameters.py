"""The weights of one rank, as the blocks read them. Shapes are this rank's.

H heads, K = V = kda_head_dim, P = H * K, W the convolution width, E experts of this rank, I an
expert's width, L the latent the routed experts work on, N the hidden size. A fused projection
stacks the rows of its parts in the order of its name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class KdaWeights:
    proj: torch.Tensor
    """[4P + F + H, N] q | k | v | gate | f_a | b. A low-rank gate puts g_a [F, N] in its place."""
    f_b: torch.Tensor
    """[P, F]."""
    g_b: torch.Tensor | None
    """[P, F] second half of a low-rank output gate; None: the gate is full rank."""
    conv: torch.Tensor
    """[3P, W] f32, taps oldest first, q | k | v."""
    A_log: torch.Tensor
    """[H] f32."""
    dt_bias: torch.Tensor
    """[P] f32."""
    o_norm: torch.Tensor
    """[V] f32."""
    o_proj: torch.Tensor
    """[N, P]."""


@dataclass(frozen=True)
class MlaWeights:
    proj: torch.Tensor
    """[Q + R + D (+ H * V), N] q_a | kv_a (| gate); without a query latent q | kv_a (| gate)."""
    q_norm: torch.Tensor | None
    """[Q]; None: the model has no query latent."""
    q_b: torch.Tensor | None
    """[H * (K + D), Q]."""
    kv_norm: torch.Tensor
    """[R] for the latent of kv_lora_rank."""
    w_k: torch.Tensor
    """[H, K, R] key half of kv_b."""
    w_v: torch.Tensor
    """[H, V, R] value half of kv_b."""
    o_proj: torch.Tensor
    """[N, H * V]."""


@dataclass(frozen=True)
class AttnResWeights:
    """One selection over the bank of snapshots and the prefix sum."""

    norm: torch.Tensor
    """[N]."""
    proj: torch.Tensor
    """[N]."""


@dataclass(frozen=True)
class MlpWeights:
    gate_up: torch.Tensor
    """[2 * I, N]."""
    down: torch.Tensor
    """[N, I]."""


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts, as packed by the implementation that serves them."""

    w13: torch.Tensor
    """[E, 2I, L] gate rows, then up rows; or [E, 2I, L / 2] u8 codes."""
    w13_scale: torch.Tensor | None
    """MXFP4 [E, 2I, L / 32] u8 e8m0; NVFP4 [E, 2I, L / 16] e4m3; None: w13 is not quantized."""
    w2: torch.Tensor
    """[E, L, I]; or [E, L, I / 2] u8."""
    w2_scale: torch.Tensor | None
    """MXFP4 [E, L, I / 32] u8; NVFP4 [E, L, I / 16] e4m3."""
    w13_scale_2: torch.Tensor | None = None
    """NVFP4 [E, 2] f32, of the gate and of the up rows."""
    w2_scale_2: torch.Tensor | None = None
    """NVFP4 [E, 1] f32."""


@dataclass(frozen=True)
class MoeWeights:
    router: torch.Tensor
    """[all experts, N]."""
    router_bias: torch.Tensor
    """[all experts] f32, for selection only."""
    down: torch.Tensor | None
    """[L, N]; None: the experts read the hidden row."""
    experts: ExpertWeights
    latent_norm: torch.Tensor | None
    """[L]."""
    up: torch.Tensor | None
    """[N, L]."""
    shared: MlpWeights


@dataclass(frozen=True)
class LayerWeights:
    input_norm: torch.Tensor
    attention: KdaWeights | MlaWeights
    post_attention_norm: torch.Tensor
    mlp: MoeWeights | MlpWeights
    attention_res: AttnResWeights | None
    """Selection before the attention; None: the model has a plain residual."""
    mlp_res: AttnResWeights | None


@dataclass(frozen=True)
class ModelWeights:
    embed: torch.Tensor | None
    """[vocabulary of this rank, N]; None: not the first pipeline stage."""
    layers: tuple[LayerWeights, ...]
    """Of this rank's pipeline stage."""
    output_res: AttnResWeights | None
    """None: a plain residual, or not the last stage."""
    norm: torch.Tensor | None
    """None: not the last stage."""
    head: torch.Tensor | None
    """[vocabulary of this rank, N]; None: not the last stage."""


def on_meta(weights: Any) -> Any:
    """A weight dataclass with its tensors' shapes and dtypes, and no memory."""
    if isinstance(weights, torch.Tensor):
        return torch.empty_like(weights, device="meta")
    if isinstance(weights, tuple):
        return tuple(on_meta(item) for item in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        names = [item.name for item in fields(weights)]
        return replace(weights, **{name: on_meta(getattr(weights, name)) for name in names})
    return weights


def tensors_of(weights: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a weight dataclass, at any depth."""
    if isinstance(weights, torch.Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for item in weights:
            yield from tensors_of(item)
    elif is_dataclass(weights):
        for item in fields(weights):
            yield from tensors_of(getattr(weights, item.name))
