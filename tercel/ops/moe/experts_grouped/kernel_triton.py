"""moe/experts_grouped: every product on tensor cores, a block of rows of one expert at a time.

    1. sort:    per expert of this rank, its slots in order, and how many there are
    2. FC1:     h = act(activation(act(w13 @ z)))       for blocks of one expert's slots
    3. FC2:     t = act(w2 @ h)
    4. combine: y = act(sum of weights * t)             over a token's slots, in order

Nothing is read on the host: a program finds its expert and block among the counts. Weights stand on
the left of every product and are read as tercel/ops/_lib/expert_tiles.py packs them, so that their
values pass from a load to the tensor cores within registers. In the order of their words, element
8 * q + 4 * h + 2 * c + b of a group is column 16 * h + 8 * c + 2 * q + b of the product: the rows
of z are brought into that order once, and FC1 writes h in it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_expert_tiles import exactly

CHUNK = 4096
"""Tokens at a time, which bounds the scratch memory."""


class Config(NamedTuple):
    """How a product is cut into programs."""

    rows: int
    """Slots of an expert per program."""
    columns: int = 128
    """Rows of the weight per program."""
    warps: int = 8
    stages: int = 3


CONFIGS: tuple[tuple[int, Config], ...] = (
    (16, Config(rows=32, columns=64, warps=4, stages=4)),
    (128, Config(rows=64, columns=64, warps=4, stages=4)),
    (1 << 30, Config(rows=128, columns=64, warps=4, stages=3)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides;
benchmarks/experts_prefill.py measures them."""


def choose(slots_per_expert: float) -> Config:
    return next(config for most, config in CONFIGS if slots_per_expert <= most)


def experts_grouped(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    config = choose(min(len(z), CHUNK) * ids.shape[1] / len(w13))
    packed = (w13, w13_scale, w2, w2_scale)
    act = Activation(activation, beta, linear_beta)
    parts = [
        launch(
            *(t[start : start + CHUNK] for t in (z, ids, weights)),
            packed,
            first_expert,
            act,
            config,
        )
        for start in range(0, len(z), CHUNK)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Lists(NamedTuple):
    """The slots of every expert of this rank."""

    slots: torch.Tensor
    """[E, T] i32."""
    counts: torch.Tensor
    """[E] i32."""


def launch(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: tuple[torch.Tensor | None, ...],
    first_expert: int,
    activation: Activation,
    config: Config,
) -> torch.Tensor:
    """One chunk of tokens."""
    w13, w13_scale, w2, w2_scale = packed
    lists = sort(ids, first_expert, len(w13))
    tiled = w13_scale is not None
    width = 8 * w13.shape[1] if tiled else w2.shape[2]
    if tiled:
        z = reordered(z)
    hidden = product(z, lists, w13, w13_scale, ids.shape, 2 * width, config, activation)
    outputs = product(hidden, lists, w2, w2_scale, ids.shape, z.shape[1], config, None)
    return combine(outputs, ids, weights, first_expert, len(w13))


def sort(ids: torch.Tensor, first_expert: int, experts: int) -> Lists:
    """One program per expert passes over all ids."""
    tokens, chosen = ids.shape
    lists = torch.empty(experts, tokens, dtype=torch.int32, device=ids.device)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    block = min(triton.next_power_of_2(tokens * chosen), 4096)
    _sort[(experts,)](
        ids, lists, counts, first_expert, tokens * chosen, tokens, BLOCK=block, num_warps=8
    )
    return Lists(lists, counts)


def reordered(z: torch.Tensor) -> torch.Tensor:
    """Rows of z in the order of the columns of a product."""
    out = torch.empty_like(z)
    block = min(triton.next_power_of_2(z.numel()), 4096)
    _reorder[(triton.cdiv(z.numel(), block),)](z, out, z.numel(), BLOCK=block, num_warps=8)
    return out


def product(
    x: torch.Tensor,
    lists: Lists,
    matrix: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Size,
    rows: int,
    config: Config,
    activation: Activation | None,
) -> torch.Tensor:
    """FC1 [T * k, rows / 2] with an activation, from x [T, K]; else FC2 [T * k, rows], from x
    [T * k, K]. Slots of other ranks' experts are not written."""
    tokens, chosen = slots
    is_up = activation is not None
    depth = x.shape[1]
    out = torch.empty(tokens * chosen, rows // 2 if is_up else rows, dtype=x.dtype, device=x.device)
    experts = len(matrix)
    columns = min(config.columns, triton.next_power_of_2(rows))
    # Every expert's last block may be short.
    blocks = triton.cdiv(tokens * chosen, config.rows) + min(experts, tokens * chosen)
    grid = (triton.cdiv(rows, columns), blocks)
    options: dict[str, Any] = {
        "CHOSEN": chosen if is_up else 1,
        "EXPERTS": experts,
        "EXPERTS_PADDED": triton.next_power_of_2(experts),
        "M": rows,
        "K": depth,
        "ROWS": config.rows,
        "COLUMNS": columns,
        "UP": is_up,
        **activation_options(activation),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if scales is None:
        _rows_product[grid](
            x, *lists, matrix, out, tokens, DEPTH=min(64, triton.next_power_of_2(depth)), **options
        )
    else:
        split = Split(depth)
        options |= {"PARTS": split.parts, "GROUPS": split.groups_per_part}
        options |= {"LOADS": split.loads, "OCTETS": split.octets, "EXACT": exactly(x)}
        _tiles_product[grid](x, *lists, matrix, scales.view(torch.uint8), out, tokens, **options)
    return out


def combine(
    outputs: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int,
    experts: int,
) -> torch.Tensor:
    """act(sum over a token's slots on this rank)."""
    tokens, chosen = ids.shape
    latent = outputs.shape[1]
    y = torch.empty(tokens, latent, dtype=outputs.dtype, device=outputs.device)
    block = min(triton.next_power_of_2(latent), 1024)
    _combine[(tokens, triton.cdiv(latent, block))](
        outputs, ids, weights, y, first_expert, experts, latent, CHOSEN=chosen, BLOCK=block
    )
    return y


@triton.jit
def _sort(ids, lists, counts, first_expert, total, tokens, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    lists += expert.to(tl.int64) * tokens
    found = 0
    for start in range(0, total, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        ours = tl.load(ids + slot, mask=slot < total, other=-1) == first_expert + expert
        rank = found + tl.cumsum(ours.to(tl.int32), 0) - 1
        tl.store(lists + rank, slot, mask=ours)
        found += tl.sum(ours.to(tl.int32), 0)
    tl.store(counts + expert, found)


@triton.jit
def _place(column):
    """Where a column of a product lies in the natural order of its group of 32."""
    within = column % 32
    q = within % 8 // 2
    return column - within + 8 * q + within // 16 * 4 + within % 16 // 8 * 2 + within % 2


@triton.jit
def _reorder(x, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + _place(at), mask=at < total), mask=at < total)


@triton.jit
def _block_of(counts, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """(Expert, first place in its list, its count) of this program's block; count 0: none."""
    block = tl.program_id(1)
    expert = tl.arange(0, EXPERTS_PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    blocks = (count + ROWS - 1) // ROWS
    end = tl.cumsum(blocks, 0)
    ours = (end > block) & (end - blocks <= block)
    which = tl.sum(tl.where(ours, expert, 0), 0)
    start = tl.sum(tl.where(ours, block - (end - blocks), 0), 0) * ROWS
    return which, start, tl.sum(tl.where(ours, count, 0), 0)


@triton.jit
def _registers(words):
    """The eight codes of a word as bf16 in four registers, times 2 ** -126."""
    kept: tl.constexpr = -0x7E3F7E40  # bits 15 and 8..6 of both halves
    sign: tl.constexpr = -0x7FFF8000
    r2 = ((words << 6) & 0x01C001C0) | ((words << 1) & sign)
    r3 = ((words >> 3) & 0x01C001C0) | ((words << 2) & sign)
    return words & kept, (words << 3) & kept, r2, r3


@triton.jit
def _scaled(register, byte, act: tl.constexpr, EXACT: tl.constexpr):
    """Its two values, with the group's scale: exact in bf16, where they are 2 ** 63 too small."""
    if EXACT:
        big: tl.constexpr = 2.0**126
        scale = (byte << 23).to(tl.float32, bitcast=True)
        low = ((register << 16).to(tl.float32, bitcast=True) * big * scale).to(act)
        high = ((register & -65536).to(tl.float32, bitcast=True) * big * scale).to(act)
    else:
        power = byte + 63 << 7
        both = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [register, power << 16 | power], tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _tiles_product(
    x,  # FC1: [T, K], FC2: [slots, K] act, in the order of columns
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    words,  # packed
    scales,
    out,  # [slots, M or M / 2] act
    tokens,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UP: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    EXACT: tl.constexpr,
):
    expert, start, count = _block_of(counts, EXPERTS, EXPERTS_PADDED, ROWS)
    if count > 0:
        TILES: tl.constexpr = COLUMNS // 16
        act: tl.constexpr = out.dtype.element_ty
        place = start + tl.arange(0, ROWS)
        real = place < count
        slot = tl.load(lists + expert.to(tl.int64) * tokens + place, mask=real, other=0)
        source = x + (slot // CHOSEN).to(tl.int64) * K
        tile = expert.to(tl.int64) * (M // 16) + tl.program_id(0) * TILES + tl.arange(0, TILES)
        there = tl.program_id(0) * TILES + tl.arange(0, TILES) < M // 16
        # A row of the product: tile, half, g; a column: parity, h, c, q, b.
        g = tl.arange(0, 8)
        q = tl.arange(0, 4)
        half = tl.arange(0, 2)
        lane = 16 * g[None, None, :, None, None] + 4 * q[None, None, None, None, :]
        lane += 2 * half[None, :, None, None, None] + half[None, None, None, :, None]
        mine = there[:, None, None, None, None]
        at = words + (tile[:, None, None, None, None] * (PARTS * LOADS * 128) + lane)
        scale_lane = 16 * g[None, None, :, None] + 2 * half[None, :, None, None]
        scale_lane += half[None, None, None, :]
        scale_at = scales + (tile[:, None, None, None] * (PARTS * OCTETS * 128) + scale_lane)
        column = tl.arange(0, 64)
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for step in range(PARTS * LOADS):
            part = step // LOADS
            load = step % LOADS
            held = tl.load(at + step * 128, mask=mine, other=0)
            byte = tl.load(
                scale_at + (part * OCTETS + load // 4) * 128 + load % 4 * 4,
                mask=there[:, None, None, None], other=0,
            )  # fmt: skip
            byte = tl.broadcast_to(byte.to(tl.int32)[:, :, :, :, None], (TILES, 2, 8, 2, 4))
            w = _tile(held, byte, TILES, act, EXACT)
            group = part * GROUPS + load * 2 + column // 32
            inside = (load * 2 + column // 32 < GROUPS) & (group < K // 32)
            values = tl.load(
                source[None, :] + (part * GROUPS + load * 2) * 32 + column[:, None],
                mask=inside[:, None] & real[None, :], other=0.0,
            )  # fmt: skip
            sums = tl.dot(w, values, sums, input_precision="ieee")
        if not EXACT:
            sums *= 9223372036854775808.0  # 2 ** 63
        row = slot.to(tl.int64)
        if UP:
            halves = tl.permute(tl.reshape(sums, (TILES, 2, 8, ROWS)), (0, 2, 3, 1))
            gate, up = tl.split(halves.to(act).to(tl.float32))
            done = tl.reshape(activate(gate, up, act, BETA, LINEAR_BETA), (TILES * 8, ROWS))
            element = tl.program_id(0) * (TILES * 8) + tl.arange(0, TILES * 8)
            target = out + row[None, :] * (M // 2) + _column(element)[:, None]
            tl.store(target, done.to(act), mask=real[None, :] & (element < M // 2)[:, None])
        else:
            element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
            target = out + row[None, :] * M + element[:, None]
            tl.store(target, sums.to(act), mask=real[None, :] & (element < M)[:, None])


@triton.jit
def _column(place):
    """The inverse of _place."""
    within = place % 32
    return (
        place - within + within % 8 // 4 * 16 + within % 4 // 2 * 8 + within // 8 * 2 + within % 2
    )


@triton.jit
def _tile(words, byte, TILES: tl.constexpr, act: tl.constexpr, EXACT: tl.constexpr):
    """act [16 * TILES, 64] of words [TILES, half, g, parity, q] and their groups' scales."""
    r0, r1, r2, r3 = _registers(words)
    a0, b0 = _scaled(r0, byte, act, EXACT)
    a1, b1 = _scaled(r1, byte, act, EXACT)
    a2, b2 = _scaled(r2, byte, act, EXACT)
    a3, b3 = _scaled(r3, byte, act, EXACT)
    # Register 2 * h + c and its halves b: [..., q, b], then c, then h.
    first = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    second = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    whole = tl.join(first, second)  # [TILES, half, g, parity, q, b, c, h]
    return tl.reshape(tl.permute(whole, (0, 1, 2, 3, 7, 6, 4, 5)), (16 * TILES, 64))


@triton.jit
def _rows_product(
    x,  # FC1: [T, K], FC2: [slots, K] act
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    matrices,  # [experts, M, K] act
    out,  # [slots, M or M / 2] act
    tokens,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UP: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, start, count = _block_of(counts, EXPERTS, EXPERTS_PADDED, ROWS)
    if count > 0:
        act: tl.constexpr = out.dtype.element_ty
        place = start + tl.arange(0, ROWS)
        real = place < count
        slot = tl.load(lists + expert.to(tl.int64) * tokens + place, mask=real, other=0)
        row = slot.to(tl.int64)
        element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = element < M
        # Gate and up rows of a column stand next to each other.
        own = element % 2 * (M // 2) + element // 2 if UP else element
        matrix = matrices + (expert.to(tl.int64) * M + own)[:, None] * K
        source = x + (slot // CHOSEN).to(tl.int64) * K
        k = tl.arange(0, DEPTH)
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for begin in range(0, K, DEPTH):
            left = k < K - begin
            w = tl.load(
                matrix + begin + k[None, :], mask=inside[:, None] & left[None, :], other=0.0
            )
            values = tl.load(
                source[None, :] + begin + k[:, None], mask=left[:, None] & real[None, :], other=0.0
            )
            sums = tl.dot(w, values, sums, input_precision="ieee")
        if UP:
            halves = tl.permute(tl.reshape(sums, (COLUMNS // 2, 2, ROWS)), (0, 2, 1))
            gate, up = tl.split(halves.to(act).to(tl.float32))
            done = activate(gate, up, act, BETA, LINEAR_BETA)
            column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            target = out + row[None, :] * (M // 2) + column[:, None]
            tl.store(target, done.to(act), mask=real[None, :] & (column < M // 2)[:, None])
        else:
            target = out + row[None, :] * M + element[:, None]
            tl.store(target, sums.to(act), mask=real[None, :] & inside[:, None])


@triton.jit
def _combine(
    outputs,  # [T * CHOSEN, latent] act
    ids,  # [T, CHOSEN] i64
    weights,  # [T, CHOSEN] f32
    y,  # [T, latent] act
    first_expert,
    experts,
    latent,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(CHOSEN):
        slot = token * CHOSEN + index
        expert = tl.load(ids + slot) - first_expert
        if (expert >= 0) & (expert < experts):
            values = tl.load(outputs + slot * latent + element, mask=element < latent, other=0.0)
            total += tl.load(weights + slot) * values.to(tl.float32)
    tl.store(y + token * latent + element, total.to(y.dtype.element_ty), mask=element < latent)
