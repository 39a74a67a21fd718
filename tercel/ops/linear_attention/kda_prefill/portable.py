"""KDA over prompts in the chunked form: matrix products instead of a token at a time."""

from itertools import pairwise

import torch

from tercel.ops._lib.delta_rule import (
    Chunk,
    advance,
    pad_tokens,
    power_of_two,
    prepare,
    run_chunk,
    strength,
)
from tercel.ops._lib.pools import store_rows
from tercel.ops.linear_attention.kda_prefill.reference import l2_normalize, split_heads

CHUNK = 16
"""Tokens that share one triangular system."""

SEGMENT = 128
"""Tokens, whole chunks, that are prepared at once: intermediates stay in a core's cache."""


def kda_prefill(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    o = qkv.new_empty(qkv.shape[0], *state.shape[1:3])
    states = state.index_select(0, slots)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if fresh[row]:
            states[row].zero_()
        size = min(CHUNK, power_of_two(max(1, stop - start)))
        for first in range(start, stop, SEGMENT):
            tokens = slice(first, min(first + SEGMENT, stop))
            chunks = _prepare(qkv[tokens], g[tokens], b[tokens], states[row], size)
            o[tokens] = _run(chunks, states[row])[:, : o[tokens].shape[0]].transpose(0, 1)
    store_rows(state, slots, states)
    return o


def _prepare(
    qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor, size: int
) -> Chunk:
    """The chunks of a segment, [H, chunks, size, *]."""
    heads, v_dim, k_dim = state.shape
    q, k, v = split_heads(qkv.to(state.dtype), heads, k_dim, v_dim)
    q, k, beta = l2_normalize(q) * k_dim**-0.5, l2_normalize(k), strength(b, state.dtype)
    count = -(-qkv.shape[0] // size)

    def chunked(x: torch.Tensor) -> torch.Tensor:
        padded = pad_tokens(x.transpose(0, 1), count * size)
        return torch.unflatten(padded, 1, (count, size)).contiguous()

    return prepare(*map(chunked, (q, k, v, g, beta.unsqueeze(-1))))


def _run(chunks: Chunk, state: torch.Tensor) -> torch.Tensor:
    """Outputs [H, L, V]; the state [H, V, K] is carried on in place."""
    outputs = []
    for index in range(chunks.keys.shape[1]):
        chunk = Chunk(*(part[:, index] for part in chunks))
        output, errors = run_chunk(chunk, state)
        advance(chunk, state, errors)
        outputs.append(output)
    return torch.cat(outputs, 1)
