"""Attention of Kimi K3 in a decode step, beside FlashMLA's dense decode.

FlashMLA gives the mixed latents of a bf16 cache; what our op does besides, w_v and the gate, it
leaves to others.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.contract.timing import Work
from tercel.ops.attention.mla_decode.contract import HEAD

TP16 = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SPECULATIVE = ("tp16_moetp4ep4",)
KIB = 1024


def cell(
    why: str,
    layouts: tuple[str, ...],
    heads: int,
    context: int,
    rows: int,
    *,
    width: int = 1,
    fp8: bool = False,
) -> Cell:
    """`rows` rows whose last token sees `context` entries."""
    sizes = {"H": heads, "PS": 64, "PAGES": rows * context // 64 + 1, "width": width}
    form = {"fp8": True} if fp8 else {}
    contexts = (context - width,) * rows
    return Cell(why, layouts, **HEAD, **sizes, gated=True, contexts=contexts, **form)


def flash_mla(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    width: int,
    scale: float,
    **_: Any,
) -> Work:
    """Its schedule is made here, once, as it is meant to be."""
    package = find_spec("flash_mla")
    if package is None or not package.submodule_search_locations:
        raise ImportError(name="flash_mla")
    (library,) = Path(package.submodule_search_locations[0]).glob("_C_legacy*.so")
    torch.ops.load_library(str(library))
    run = torch.ops.flash_mla_legacy.dense_decode_fwd
    rank = HEAD["L"]
    inputs = (
        query.view(len(context_lens), width, *query.shape[1:]),
        pages.unsqueeze(2),
        rank,
        (context_lens + width).int(),
        block_table.int(),
        scale,
        True,
    )
    *_, schedule, splits = run(*inputs, None, None)
    return lambda: run(*inputs, schedule, splits)


BENCH = Bench(
    cells=(
        *(
            cell("one request, several", TP16, 6, context * KIB, rows)
            for context, rows in ((1, 1), (8, 1), (64, 1), (8, 8), (64, 8))
        ),
        cell("longest context", TP16, 6, 256 * KIB, 1),
        *(
            cell("seven drafts", SPECULATIVE, 6, context * KIB, rows, width=8)
            for context, rows in ((8, 1), (8, 8), (64, 1))
        ),
        cell("seven drafts", ("tp8_pp2",), 12, 8 * KIB, 8, width=8),
        cell("FP8 cache", TP16, 6, 64 * KIB, 1, fp8=True),
        cell("a rank of eight", ("tp8_pp2",), 12, 8 * KIB, 8),
        *(
            cell("every head", (), 96, context * KIB, rows)
            for context, rows in ((1, 1), (8, 1), (8, 8), (64, 8))
        ),
    ),
    peers={"flash_mla": flash_mla},
    goals=tuple(
        Goal(us, H=6, width=1, contexts=(context * KIB - 1,) * rows)
        for us, context, rows in ((6, 1, 1), (10, 8, 1), (30, 64, 1), (143, 64, 8))
    ),
)
