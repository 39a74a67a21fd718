"""linear_attention/kda_commit, one program per row, head and tile of value channels: accepted
records are folded into its tile of the state; the first tile's program also moves the head's window
on by as many rows. Slots with nothing pending, and the sink, are not touched.

The records of drafts that were not accepted are loaded and not used, so that no load waits for the
arithmetic of the draft before it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_kda import delta_rule, head_channels, load_keys, load_tile, store_tile

TILE, PARTS, WARPS = 32, 2, 4
"""Value channels of a program, parts of the keys that a thread holds, warps of a program."""


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
    drafts = draft_k.shape[1]
    if drafts == 0:
        return
    past, tile = conv.shape[1] - drafts, min(TILE, v_dim)
    _commit[(v_dim // tile, heads, slots.shape[0])](
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
        TILE=tile,
        PARTS=PARTS,
        num_warps=WARPS,
        launch_pdl=True,
    )


@triton.jit
def _move_window(window, rows, channel, accepted, C, PAST: tl.constexpr):
    """Rows accepted .. accepted + PAST - 1 become rows 0 .. PAST - 1."""
    here = window + rows[:, None] * C + channel[None, :]
    is_row = (rows < PAST)[:, None]
    kept = tl.load(here + accepted * C, mask=is_row, other=0.0)
    tl.debug_barrier()  # every thread has its rows before any is replaced
    tl.store(here, kept, mask=is_row)


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
):
    C = H * (2 * K + V)
    tile_index = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    slot = tl.load(slots + row)
    accepted = tl.load(pending + row)
    if (slot == 0) | (accepted == 0):
        return

    if tile_index == 0:
        rows = tl.arange(0, ROWS)
        window = conv + slot * window_stride
        q_channel, k_channel, v_channel = head_channels(head, H, K, V)
        _move_window(window, rows, q_channel, accepted, C, PAST)
        _move_window(window, rows, k_channel, accepted, C, PAST)
        _move_window(window, rows, v_channel, accepted, C, PAST)

    values = tile_index * TILE + tl.arange(0, TILE)
    state = recurrent + (slot * H + head) * (V * K) + tile_index * (TILE * K)
    tile = load_tile(state, K, TILE, PARTS)
    for draft in tl.static_range(D):
        is_kept = draft < accepted
        record = (slot * D + draft) * H + head
        k = load_keys(draft_k + record * K, K, PARTS)
        g = load_keys(draft_g + record * K, K, PARTS)
        kept_k = ()
        decay = ()
        for part in tl.static_range(PARTS):
            kept_k = kept_k + (tl.where(is_kept, k[part], 0.0),)  # noqa: RUF005
            decay = decay + (tl.where(is_kept, tl.exp(g[part]), 1.0),)  # noqa: RUF005
        v = tl.where(is_kept, tl.load(draft_v + record * V + values).to(tl.float32), 0.0)
        beta = tl.where(is_kept, tl.load(draft_beta + record), 0.0)
        tile = delta_rule(tile, kept_k, decay, v, beta, PARTS)
    store_tile(state, tile, K, TILE, PARTS)
