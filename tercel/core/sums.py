"""The one order in which ranks' tensors are added."""

from collections.abc import Sequence

import torch

CHUNK = 8


def rank_ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of `parts` in rank order, in fp32 (fp64 for fp64), in chunks of eight ranks, rounded
    once to their dtype: sum = (p0 + ... + p7) + (p8 + ... + p15) + ..."""
    if not parts[0].is_floating_point():
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total: torch.Tensor | None = None
    for start in range(0, len(parts), CHUNK):
        chunk = parts[start].to(wide)
        for part in parts[start + 1 : start + CHUNK]:
            chunk = chunk + part.to(wide)
        total = chunk if total is None else total + chunk
    assert total is not None
    return total.to(parts[0].dtype)
