"""Prompts of Kimi K3, per rank of 16, per rank of 8, and with all heads.

The goals are the better of FlashKDA and fla, measured on an H200 with the gate inside them. Longer
calls are timed by benchmarks/kda_prefill_long.py: a reference token by token takes minutes there.
"""

from typing import Any

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.contract.timing import Work

PROMPT, LONG, BATCH = (0, 1024), (0, 8192), tuple(range(0, 8193, 1024))
GOALS_US = {
    (6, PROMPT): 80,
    (6, LONG): 351,
    (6, BATCH): 175,
    (12, PROMPT): 93,
    (12, LONG): 509,
    (12, BATCH): 218,
    (96, PROMPT): 208,
}
LAYOUTS = {6: ("tp16_moetp4ep4", "tp16_moetp16ep1"), 12: ("tp8_pp2",), 96: ("tp1",)}


def cell(heads: int, bounds: tuple[int, ...]) -> Cell:
    sizes = {"H": heads, "K": 128, "V": 128, "SLOTS": len(bounds) + 1}
    return Cell("prompts", LAYOUTS[heads], **sizes, g_min=-1.0, cu_seqlens=bounds)


def fla(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: tuple[int, ...],
    **_: Any,
) -> Work:
    """On its own copies of the states; its final states stay outside the pool."""
    from fla.ops.kda import chunk_kda

    _, heads, v_dim, k_dim = state.shape
    widths = (heads * k_dim, heads * k_dim, heads * v_dim)
    q, k, v = (x.unflatten(-1, (heads, -1))[None].contiguous() for x in qkv.split(widths, -1))
    initial = torch.nan_to_num(state[slots])
    bounds = torch.tensor(cu_seqlens, device=qkv.device)

    @torch.no_grad()
    def run() -> object:
        return chunk_kda(
            q,
            k,
            v,
            g[None],
            b[None],
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            cu_seqlens=bounds,
        )

    run()  # it reads the bounds on the host, once
    return run


BENCH = Bench(
    cells=tuple(cell(heads, bounds) for heads, bounds in GOALS_US),
    peers={"fla": fla},
    goals=tuple(Goal(us, H=heads, cu_seqlens=bounds) for (heads, bounds), us in GOALS_US.items()),
)
