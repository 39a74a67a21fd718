"""linear_attention/kda_commit, one program per row and head, as kda_verify begins: accepted records
are folded into the state, a tile of value channels at a time, and the window moves on by as many
rows. Slots with nothing pending, and the sink, are not touched.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_kda import delta_rule, load_keys, load_tile, store_tile

TILE, PARTS, WARPS = 32, 2, 4
"""Value channels at a time, parts of the keys that a thread holds, warps of a program."""


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
    past = conv.shape[1] - drafts
    _commit[(heads, slots.shape[0])](
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
        TILE=min(TILE, v_dim),
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
    head = tl.program_id(0)
    row = tl.program_id(1)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    slot = tl.load(slots + row)
    accepted = tl.load(pending + row)
    if (slot == 0) | (accepted == 0):
        return

    rows = tl.arange(0, ROWS)
    window = conv + slot * window_stride
    q_channel = head * K + tl.arange(0, K)
    v_channel = 2 * H * K + head * V + tl.arange(0, V)
    _move_window(window, rows, q_channel, accepted, C, PAST)
    _move_window(window, rows, H * K + q_channel, accepted, C, PAST)
    _move_window(window, rows, v_channel, accepted, C, PAST)

    state = recurrent + (slot * H + head) * (V * K)
    for start in range(0, V, TILE):
        channels = start + tl.arange(0, TILE)
        tile = load_tile(state + start * K, K, TILE, PARTS)
        for draft in range(0, accepted):
            record = (slot * D + draft) * H + head
            k = load_keys(draft_k + record * K, K, PARTS)
            g = load_keys(draft_g + record * K, K, PARTS)
            decay = ()
            for part in tl.static_range(PARTS):
                decay = decay + (tl.exp(g[part]),)  # noqa: RUF005
            v = tl.load(draft_v + record * V + channels).to(tl.float32)
            tile = delta_rule(tile, k, decay, v, tl.load(draft_beta + record), PARTS)
        store_tile(state + start * K, tile, K, TILE, PARTS)
