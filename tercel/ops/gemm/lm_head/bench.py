"""A rank's logits of Kimi K3, beside cuBLAS."""

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench

PARTS = {10240: ("tp16_moetp4ep4", "tp16_moetp16ep1"), 20480: ("tp8_pp2",), 33792: ("tp8_pp2",)}


def cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The logits in act."""
    return torch.nn.functional.linear(x, weight)


BENCH = Bench(
    cells=tuple(
        Cell("part of the vocabulary", layouts, S=rows, N=7168, V=vocabulary)
        for vocabulary, layouts in PARTS.items()
        for rows in (1, 8, 64)
    ),
    baselines={"cublas": cublas},
)
