"""Kimi K3's router, beside cuBLAS on widened inputs."""

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench


def cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product rounded to act, which the op does not allow: what it costs not to round."""
    return torch.nn.functional.linear(x, weight)


BENCH = Bench(
    cells=(
        *(
            Cell("every expert's logit", ("tp16_moetp4ep4", "tp8_pp2"), T=tokens, K=7168, M=896)
            for tokens in (1, 8, 64, 4096)
        ),
        *(
            Cell("a rank's part", ("tp16_moetp4ep4",), T=tokens, K=7168, M=56)
            for tokens in (1, 8, 64)
        ),
    ),
    baselines={"cublas": cublas},
)
