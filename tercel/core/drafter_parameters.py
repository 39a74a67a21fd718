"""The weights of a drafter on one rank, as its block reads them. Shapes are this rank's.

N hidden size, M the target's, L layers, H heads and KV key and value heads of D channels, E what a
layer caches per token (2 * KV * D, or the latent and the turned part of MLA), I the MLP's width, V
the vocabulary, B the rank of the Markov head. The head and, mostly, the embedding are the target's.
"""

from dataclasses import dataclass

import torch

from tercel.core.parameters import MlaWeights, MlpWeights


@dataclass(frozen=True)
class GqaWeights:
    qkv: torch.Tensor
    """[(H + 2 * KV) * D, N] q | k | v."""
    q_norm: torch.Tensor
    """[D]."""
    k_norm: torch.Tensor
    """[D]."""
    o_proj: torch.Tensor
    """[N, H * D]."""


@dataclass(frozen=True)
class DrafterLayerWeights:
    input_norm: torch.Tensor
    attention: GqaWeights | MlaWeights
    post_attention_norm: torch.Tensor
    mlp: MlpWeights


@dataclass(frozen=True)
class ContextWeights:
    """What makes the cached rows of all layers out of the taps of a token."""

    tap_norm: torch.Tensor | None
    """[taps, M], one norm per tap; None: they are not normed."""
    fc: torch.Tensor
    """[N, taps * M / ranks]: this rank's input features; the ranks' products are added."""
    norm: torch.Tensor
    """[N]."""
    kv: torch.Tensor
    """[L * E, N]: the rows of every layer's projection that make its cached entry."""
    kv_norm: torch.Tensor
    """[L, D] of keys, or [L, latent] of MLA."""


@dataclass(frozen=True)
class MarkovWeights:
    w1: torch.Tensor
    """[whole vocabulary, B]."""
    w2: torch.Tensor
    """[V, B]."""


@dataclass(frozen=True)
class ConfidenceWeights:
    proj: torch.Tensor
    """[1, N (+ B)] hidden row, then the Markov embedding of the token before."""
    bias: torch.Tensor
    """[1]."""


@dataclass(frozen=True)
class DrafterWeights:
    context: ContextWeights
    layers: tuple[DrafterLayerWeights, ...]
    norm: torch.Tensor
    markov: MarkovWeights | None
    confidence: ConfidenceWeights | None
    embed: torch.Tensor | None
    """[V, N] of a table of the drafter's own; None: the target's."""
    mask_row: torch.Tensor | None
    """[N] what a mask token is embedded as; None: its row of the table."""
    inv_freq: torch.Tensor
    """[turning channels / 2] f32 radians per position; follows from the config."""
