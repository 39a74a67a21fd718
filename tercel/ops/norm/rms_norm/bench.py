"""Norms of Kimi K3 and Kimi-Linear: hidden rows, latents, prefill."""

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")


def torch_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """torch's fused norm, which rounds once."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


BENCH = Bench(
    cells=(
        *(Cell("hidden rows", LAYOUTS, T=tokens, N=7168) for tokens in (1, 8, 64, 4096)),
        *(Cell("latent of the experts", LAYOUTS, T=tokens, N=3584) for tokens in (1, 8, 64)),
        *(Cell("query latent", LAYOUTS, T=tokens, N=1536) for tokens in (1, 64)),
    ),
    baselines={"torch": torch_norm},
)
