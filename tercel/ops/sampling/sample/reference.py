"""Row by row, with a Philox of its own in Python integers."""

import torch

WORD = (1 << 32) - 1


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: int,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, finite = [], []
    for row, heat, k, p, m, seed, position in zip(
        logits.double(),
        temperature.tolist(),
        top_k.tolist(),
        top_p.tolist(),
        min_p.tolist(),
        seeds.tolist(),
        positions.tolist(),
        strict=True,
    ):
        finite.append(not bool(row.isnan().any()) and bool(row.max().isfinite()))
        if not finite[-1]:
            tokens.append(0)
        elif heat == 0:
            tokens.append(int(row.argmax()))
        else:
            kept = keep(torch.softmax(row / heat, 0), k, p, m)
            tokens.append(draw(kept, uniform(seed, position, stream)))
    device = logits.device
    return torch.tensor(tokens, dtype=torch.int64, device=device), torch.tensor(
        finite, dtype=torch.bool, device=device
    )


def keep(probabilities: torch.Tensor, k: int, p: float, m: float) -> torch.Tensor:
    """The probabilities, zero where a filter drops the token."""
    kept = probabilities
    if 0 < k < len(kept):
        kept = kept.where(kept >= kept.topk(k).values[-1], 0)
    if p < 1:
        largest = kept.sort(descending=True).values
        before = largest.cumsum(0) - largest
        smallest = largest[before < p * kept.sum()][-1]
        kept = kept.where(kept >= smallest, 0)
    return kept.where(kept >= m * probabilities.max(), 0)


def draw(masses: torch.Tensor, u: float) -> int:
    """The first id whose cumulative mass exceeds u of the whole."""
    cumulative = masses.cumsum(0)
    return int((cumulative > u * cumulative[-1]).nonzero()[0])


def uniform(seed: int, position: int, stream: int) -> float:
    """Philox 4x32-10 of the counter (position, stream, 0) in [0, 1)."""
    first, second, *_ = philox((position & WORD, position >> 32 & WORD, stream, 0), seed)
    return float((first >> 5 << 26) + (second >> 6)) / 2.0**53


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Four words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & WORD, p0 >> 32 ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3
