"""FC1 and FC2 of kernel_experts.py for plain matrices."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_activation import activate
from tercel.ops._lib.kernel_local_slots import first, local_slots, without_first


@triton.jit
def _row_sums(matrix, x, inside, K: tl.constexpr, DEPTH: tl.constexpr):
    """Products [A, B] fp32 of rows at matrix [A, B] with the rows at x [A]."""
    k = tl.arange(0, DEPTH)
    sums = tl.zeros(matrix.shape, tl.float32)
    for start in tl.static_range(0, K, DEPTH):
        held = tl.load(
            matrix[:, :, None] + (start + k)[None, None, :],
            mask=inside[:, :, None] & (start + k < K)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        if start == 0:
            cuda.gdc_wait()  # x is the previous kernel's
        values = tl.load(
            x[:, None, None] + (start + k)[None, None, :],
            mask=(start + k < K)[None, None, :],
            other=0.0,
        )
        sums += tl.sum(held.to(tl.float32) * values.to(tl.float32), 2)
    return sums


@triton.jit
def gate_up_rows(
    z,  # [T, LATENT] act
    ids,  # [T, CHOSEN] i64
    matrices,  # [E, 2 * WIDTH, LATENT] act
    hidden,  # [T * CHOSEN, WIDTH] act
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAINS: tl.constexpr,
):
    token = tl.program_id(2)
    if not EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slots = local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 2)
    row = half[:, None] * WIDTH + column[None, :]
    inside = (column < WIDTH)[None, :] & (half >= 0)[:, None]
    act: tl.constexpr = hidden.dtype.element_ty
    slots = without_first(slots, tl.program_id(1), CHAINS - 1)
    while slots != 0:
        slot = token * CHOSEN + first(slots)
        slots = without_first(slots, CHAINS, CHAINS)
        expert = (tl.load(ids + slot) - first_expert).to(tl.int64)
        matrix = matrices + (expert * (2 * WIDTH) + row) * LATENT
        sums = _row_sums(matrix, z + token * LATENT + half * 0, inside, LATENT, DEPTH)
        gate, up = tl.split(tl.trans(sums.to(act).to(tl.float32)))
        activated = activate(gate, up, act, BETA, LINEAR_BETA)
        tl.store(hidden + slot * WIDTH + column, activated.to(act), mask=column < WIDTH)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def down_rows(
    hidden,  # [T * CHOSEN, WIDTH] act
    ids,  # [T, CHOSEN] i64
    weights,  # [T, CHOSEN] f32
    matrices,  # [E, LATENT, WIDTH] act
    y,  # [T, LATENT] act
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(1)
    cuda.gdc_launch_dependents()
    slots = local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    act: tl.constexpr = y.dtype.element_ty
    total = tl.zeros((ROWS,), tl.float32)
    while slots != 0:
        index = tl.arange(0, SLOTS)
        own = without_first(slots + 0 * index, index, SLOTS - 1)
        live = own != 0
        slot = token * CHOSEN + first(own)
        expert = tl.load(ids + slot, mask=live, other=first_expert) - first_expert
        matrix = matrices + (expert.to(tl.int64)[:, None] * LATENT + row[None, :]) * WIDTH
        inside = live[:, None] & (row < LATENT)[None, :]
        sums = _row_sums(matrix, hidden + slot * WIDTH, inside, WIDTH, DEPTH)
        share = tl.load(weights + slot, mask=live, other=0.0)
        products = sums.to(act).to(tl.float32) * share[:, None]
        total += tl.sum(tl.where(live[:, None], products, 0.0), 0)
        slots = without_first(slots, SLOTS, SLOTS)
    cuda.gdc_wait()
    tl.store(y + token * LATENT + row, total.to(act), mask=row < LATENT)
