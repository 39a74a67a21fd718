"""The convolution of a prefill step, beside plain torch."""

from itertools import accumulate

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench

BATCHES = ((1024,), (8192,), (1024,) * 8)


def torch_conv1d(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: tuple[int, ...], **_: object
) -> torch.Tensor:
    """One sequence without a past, in cuDNN's layout; the bytes of the convolution and SiLU."""
    taps = weight.to(x.dtype).unsqueeze(1)
    y = torch.nn.functional.conv1d(x.t().unsqueeze(0), taps, padding=3, groups=x.shape[1])
    return torch.nn.functional.silu(y)


def cell(why: str, layouts: tuple[str, ...], channels: int, lengths: tuple[int, ...]) -> Cell:
    bounds = (0, *accumulate(lengths))
    return Cell(why, layouts, C=channels, W=4, S=3, SLOTS=len(lengths) + 1, cu_seqlens=bounds)


BENCH = Bench(
    cells=(
        *(cell("K3, a rank of 16", ("tp16_moetp4ep4",), 2304, lengths) for lengths in BATCHES),
        cell("Kimi-Linear", ("tp1",), 12288, (8192,)),
    ),
    baselines={"torch": torch_conv1d},
)
