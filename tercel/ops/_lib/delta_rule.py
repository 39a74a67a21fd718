"""The gated delta rule of KDA, a chunk of tokens at a time, in plain torch.

Token by token, on a state S [V, K] (value channels first):

    S = S * exp(g);   e = beta * (v - S k);   S = S + e k^T;   o = S q

Over a chunk, the errors e solve a unit lower triangular system, and everything else is a product of
matrices. The decay between two tokens is the product of the decays of the tokens between them, all
at most 1: `_decayed_scores` forms these products over ever longer halves of the chunk, so none is a
quotient exp(sum) / exp(sum), which overflows at the decays of K3, nor the exponential of a
difference of long sums, which loses digits. The system is solved by substitution: the power series
of the inverse is unstable where decays are weak.

Source: Kimi Linear, arXiv 2510.26692, section 3 (chunkwise form).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

FORGOTTEN = 1e-18
"""Products of decays stop here: nothing beside the rounding even of fp64, while the product of two
is still a normal fp32 number, which the processor does not handle on a slow path."""


class Chunk(NamedTuple):
    """Chunks of C tokens as far as they do not depend on the state that they start from."""

    values: torch.Tensor
    """[..., C, V] errors if the state were zero."""
    reads: torch.Tensor
    """[..., 2C, K] what reads the state: the system's keys, then the decayed queries."""
    scores: torch.Tensor
    """[..., C, C] lower triangular q.k, decayed from key to query."""
    keys: torch.Tensor
    """[..., C, K] keys decayed to the end of the chunk."""
    decay: torch.Tensor
    """[..., 1, K] decay over the whole chunk."""


def strength(b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """beta = sigmoid(b) in `dtype`. By way of fp64: in fp32 the last few elements of a tensor pass
    through another function than the rest, and which they are depends on the number of heads."""
    return b.double().sigmoid().to(dtype)


def power_of_two(length: int) -> int:
    """The least power of two that is not below `length` >= 1."""
    return 1 << (length - 1).bit_length()


def pad_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    """[..., L, D] with zeros up to `length` tokens: a token of zeros changes no state."""
    return F.pad(x, (0, 0, 0, length - x.shape[-2]))


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> Chunk:
    """Chunks from q, k, g [..., C, K], v [..., C, V], beta [..., C, 1]; C is a power of two."""
    scores, since_start, until_end = _decayed_scores(q, k, g)
    known = torch.cat((v, k * since_start), -1).mul_(beta)
    solved = torch.linalg.solve_triangular(
        scores[..., 0, :] * beta, known, upper=False, unitriangular=True
    )
    return Chunk(
        values=solved[..., : v.shape[-1]],
        reads=torch.cat((solved[..., v.shape[-1] :], q * since_start), -2),
        scores=scores[..., 1, :],
        keys=k * until_end,
        decay=since_start[..., -1:, :],
    )


def run_chunk(chunk: Chunk, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, C, V] of a chunk with one leading axis, and its errors, on state [B, V, K]."""
    length = chunk.keys.shape[-2]
    reads = torch.bmm(chunk.reads, state.mT)
    errors = chunk.values - reads[:, :length]
    return torch.baddbmm(reads[:, length:], chunk.scores, errors), errors


def advance(chunk: Chunk, state: torch.Tensor, errors: torch.Tensor) -> None:
    """Carries the state [B, V, K] over the chunk, in place."""
    state.mul_(chunk.decay).baddbmm_(errors.mT, chunk.keys)


def _decayed_scores(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores [..., C, 2, C]: k.k (below the diagonal) and q.k (with it) of token pairs, later one
    first, decayed between them; decays [..., C, K] from the start through a token, and from after
    it to the end."""
    length = g.shape[-2]
    readers = torch.stack((k, q), -2)
    scores = torch.zeros(*g.shape[:-1], 2, length, dtype=g.dtype, device=g.device)
    scores[..., 1, :].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    through = g.exp().clamp_(min=FORGOTTEN)
    after = torch.ones_like(g)
    half = 1
    while half < length:
        pairs = (length // (2 * half), 2, half)
        through_early, through_late = torch.unflatten(through, -2, pairs).unbind(-3)
        after_early = torch.unflatten(after, -2, pairs).select(-3, 0)
        late = torch.unflatten(readers, -3, pairs).select(-4, 1) * through_late.unsqueeze(-2)
        early = torch.unflatten(k, -2, pairs).select(-3, 0) * after_early
        block = late.flatten(-3, -2) @ early.mT
        tiles = scores.view(*g.shape[:-2], *pairs, 2, *pairs).select(-6, 1).select(-2, 0)
        block = torch.unflatten(block, -2, (half, 2)).movedim(-4, -1)
        tiles.diagonal(dim1=-5, dim2=-2).copy_(block)
        after_early.mul_(through_late[..., -1:, :]).clamp_(min=FORGOTTEN)
        through_late.mul_(through_early[..., -1:, :]).clamp_(min=FORGOTTEN)
        half *= 2
    return scores, through, after
