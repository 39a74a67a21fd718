"""Attention residuals of Kimi K3."""

from functools import partial
from typing import Any

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.contract.timing import Work
from tercel.ops._lib.fla_tuning import narrow_tuning
from tercel.ops.norm.attn_res_rms_norm.portable import attn_res_rms_norm

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")


def fla(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    **_: Any,
) -> Work:
    """The same in one kernel, without the mixture."""
    from fla.ops.attnres import fused_attnres

    narrow_tuning()
    rows = [*bank, prefix]
    call = partial(fused_attnres, res_proj, rows, res_norm, weight, rms_eps=eps)
    return torch.no_grad()(call)


BENCH = Bench(
    cells=(
        *(Cell("a late layer", LAYOUTS, S=8, T=tokens, N=7168) for tokens in (1, 8, 64, 2048)),
        *(Cell("fewer and more", LAYOUTS, S=snapshots, T=8, N=7168) for snapshots in (1, 4, 11)),
    ),
    baselines={"torch": attn_res_rms_norm},
    peers={"fla": fla},
    goals=(Goal(3.0, S=8, T=1), Goal(3.5, S=8, T=8), Goal(6.0, S=8, T=64)),
)
