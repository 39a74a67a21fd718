"""Projections of a decode step beside cuBLAS: every site of Kimi K3, per layout and drafter."""

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal

TP16 = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SITES = (
    ("KDA projections", TP16, 3208, 7168, None),
    ("MLA projections with gate", TP16, 2880, 7168, 2112),
    ("attention output projection", TP16, 7168, 768, None),
    ("MLA query expansion", TP16, 1152, 1536, None),
    ("decay expansion", TP16, 768, 128, None),
    ("head of the MoE", TP16, 280, 7168, None),
    ("latent down", TP16, 3584, 7168, None),
    ("latent up and shared down", TP16, 7168, 640, None),
    ("shared experts' gate and up", TP16, 768, 7168, None),
    ("shared experts' down", TP16, 7168, 384, None),
    ("dense gate and up", TP16, 4224, 7168, None),
    ("dense down", TP16, 7168, 2112, None),
    ("drafter's projections", TP16, 512, 7168, None),
    ("drafter's gate and up", TP16, 1792, 7168, None),
    ("drafter's down", TP16, 7168, 896, None),
    ("12 heads: KDA projections", ("tp8_pp2",), 6284, 7168, None),
    ("12 heads: output projection", ("tp8_pp2",), 7168, 1536, None),
)
WHOLE = (
    ("96 heads: KDA projections", ("tp1",), 49376, 7168, None),
    ("96 heads: output projection", ("tp1",), 7168, 12288, None),
)
TABLE = ((3208, 7168), (7168, 768), (280, 7168), (7168, 640))
"""Sites with goals of their own are timed at every count. The first goal is of 1 to 8 tokens, the
others of one, as the cuBLAS times beside which they were set."""


def cublas(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None) -> torch.Tensor:
    """The product alone."""
    return torch.nn.functional.linear(x, weight)


def counts(columns: int, depth: int) -> tuple[int, ...]:
    return (1, 2, 4, 8, 16, 32, 64) if (columns, depth) in TABLE else (1, 8, 64)


BENCH = Bench(
    cells=(
        *(
            Cell(what, layouts, T=tokens, K=depth, M=columns, sigmoid_from=gate)
            for what, layouts, columns, depth, gate in SITES
            for tokens in counts(columns, depth)
        ),
        *(
            Cell(what, layouts, T=8, K=depth, M=columns, sigmoid_from=gate)
            for what, layouts, columns, depth, gate in WHOLE
        ),
    ),
    baselines={"cublas": cublas},
    goals=(
        *(Goal(12.0, T=tokens, K=7168, M=3208) for tokens in (1, 2, 4, 8)),
        Goal(3.7, T=1, K=768, M=7168),
        Goal(3.0, T=1, K=7168, M=280),
        Goal(3.5, T=1, K=640, M=7168),
    ),
)
