"""Per-rank projections of Kimi K3 in a decode step, beside cuBLAS."""

import torch

from tercel.contract import Cell
from tercel.contract.certify import Bench

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SITES = (
    ("KDA projections", 3208, 7168, None),
    ("MLA projections with gate", 2880, 7168, 2112),
    ("attention output projection", 7168, 768, None),
    ("MLA query expansion", 1152, 1536, None),
    ("router and latent head", 280, 7168, None),
    ("MoE tail", 7168, 640, None),
)


def cublas(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None) -> torch.Tensor:
    """The product alone."""
    return torch.nn.functional.linear(x, weight)


BENCH = Bench(
    cells=tuple(
        Cell(what, LAYOUTS, T=tokens, K=depth, M=columns, sigmoid_from=gate)
        for what, columns, depth, gate in SITES
        for tokens in (1, 2, 4, 8)
    ),
    baselines={"cublas": cublas},
)
