"""linear_attention/kda_commit, one program per row, head and tile of value channels, which folds
accepted records into its tile of the state, and one per row and head that moves the window on by as
many rows. Slots with nothing pending, and the sink, are not touched.

The loads of records run two drafts ahead of their arithmetic. A call of few programs asks for all
that it will read before the wait for the previous launch.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kda import Tiles, choose_tiles
from tercel.ops._lib.kernel_kda import (
    delta_rule,
    head_channels,
    load_keys,
    load_tile,
    prefetch_window,
    store_tile,
)
from tercel.ops._lib.kernel_prefetch import prefetch

TILES: tuple[tuple[int, Tiles], ...] = (
    (16, Tiles(tile=16, parts=2, warps=4, prefetch=True)),
    (1 << 30, Tiles(tile=32, parts=4, warps=4, prefetch=True)),
)
"""By the most rows times heads, measured on an H200."""


def kda_commit(
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
) -> None:
    _, heads, v_dim, k_dim = recurrent.shape
    rows, drafts = slots.shape[0], draft_k.shape[1]
    if drafts == 0:
        return
    tiles, past = choose_tiles(TILES, rows * heads, v_dim), conv.shape[1] - drafts
    _commit[(1 + v_dim // tiles.tile, heads, rows)](
        conv,
        recurrent,
        draft_k,
        draft_v,
        draft_g,
        draft_beta,
        slots,
        pending,
        conv.stride(0),
        heads,
        K=k_dim,
        V=v_dim,
        D=drafts,
        PAST=past,
        ROWS=triton.next_power_of_2(past),
        TILE=tiles.tile,
        PARTS=tiles.parts,
        PREFETCH=tiles.prefetch,
        num_warps=tiles.warps,
        launch_pdl=True,
    )


@triton.jit
def _move_window(window, own, accepted, C, PAST: tl.constexpr, ROWS: tl.constexpr):
    """Rows accepted .. accepted + PAST - 1 of a head become rows 0 .. PAST - 1."""
    rows = tl.arange(0, ROWS)[:, None]
    kept = ()
    for part in tl.static_range(3):
        here = window + (accepted + rows) * C + own[part][None, :]
        kept = kept + (tl.load(here, mask=rows < PAST, other=0.0),)  # noqa: RUF005
    tl.debug_barrier()  # every thread has its rows before any is replaced
    for part in tl.static_range(3):
        there = window + rows * C + own[part][None, :]
        tl.store(there, kept[part], mask=rows < PAST)


@triton.jit
def _commit(
    conv,  # [slots, PAST + D, H * (2K + V)] act
    recurrent,  # [slots, H, V, K]
    draft_k,  # [slots, D, H, K]
    draft_v,  # [slots, D, H, V] act
    draft_g,  # [slots, D, H, K]
    draft_beta,  # [slots, D, H]
    slots,  # [rows] i64
    pending,  # [rows] i64
    window_stride,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    PAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    C = H * (2 * K + V)
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    moves_window = part == 0
    first_value = (part - 1) * TILE
    cuda.gdc_launch_dependents()
    slot = tl.load(slots + row)
    accepted = tl.load(pending + row)
    window = conv + slot * window_stride
    state = recurrent + (slot * H + head) * (V * K) + first_value * K
    first_record = slot * D * H + head
    if PREFETCH:
        if moves_window:
            prefetch_window(window, head, H, K, V, C, PAST + D)
            for draft in tl.static_range(D):
                record = first_record + draft * H
                prefetch(draft_k + record * K, K)
                prefetch(draft_g + record * K, K)
                prefetch(draft_v + record * V, V)
                prefetch(draft_beta + record, 1)
        else:
            prefetch(state, TILE * K)
    cuda.gdc_wait()
    if (slot == 0) | (accepted == 0):
        return
    if moves_window:
        _move_window(window, head_channels(head, H, K, V), accepted, C, PAST, ROWS)
        return

    values = first_value + tl.arange(0, TILE)
    tile = load_tile(state, K, TILE, PARTS)
    for draft in tl.range(0, accepted, num_stages=3):
        record = first_record + draft * H
        k = load_keys(draft_k + record * K, K, PARTS)
        g = load_keys(draft_g + record * K, K, PARTS)
        v = tl.load(draft_v + record * V + values).to(tl.float32)
        beta = tl.load(draft_beta + record)
        decay = ()
        for here in tl.static_range(PARTS):
            decay = decay + (tl.exp(g[here]),)  # noqa: RUF005
        tile = delta_rule(tile, k, decay, v, beta, PARTS)
    store_tile(state, tile, K, TILE, PARTS)
