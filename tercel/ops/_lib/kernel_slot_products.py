"""Products of experts with the sorted slots of many tokens, a block of one's slots at a time.

MXFP4 stands on the left and is read as expert_tiles.py packs it, so that its values pass from a
load to the tensor cores within registers. In the order of their words, element
8 * q + 4 * h + 2 * c + b of a group is column 16 * h + 8 * c + 2 * q + b of the product: rows of x
are brought into that order once (`reordered`), and FC1 writes in it.

Rows of x may be e4m3 with a scale each. The weight is then packed for e4m3, as kernel_slot_wgmma.py
wants it: scales below 2 ** -11 of their row's largest count as that.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_expert_tiles import exactly
from tercel.ops._lib.kernel_slots import Slots, column_of, element_of, ends


class Config(NamedTuple):
    """How a product is cut into programs."""

    slots: int
    """Of an expert, per program."""
    columns: int = 64
    """Rows of the weight per program."""
    warps: int = 4
    stages: int = 3


class Matrix(NamedTuple):
    """Experts' weights, plain or packed."""

    values: torch.Tensor
    """[E, M, K] act, or words."""
    scales: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    """[E, M] u8, every row's largest scale, which a product with e4m3 needs."""


class Experts(NamedTuple):
    """Those of this rank."""

    up: Matrix
    down: Matrix
    first: int
    """Id of the first."""
    activation: Activation

    @property
    def count(self) -> int:
        return len(self.up.values)

    @property
    def width(self) -> int:
        is_tiled = self.up.scales is not None
        return 8 * self.up.values.shape[1] if is_tiled else self.down.values.shape[2]

    @property
    def latent(self) -> int:
        is_tiled = self.down.scales is not None
        return 16 * self.down.values.shape[1] if is_tiled else self.down.values.shape[1]


CONFIGS: tuple[tuple[int, Config], ...] = (
    (16, Config(slots=32, stages=4)),
    (128, Config(slots=64, stages=4)),
    (1 << 30, Config(slots=128)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides;
benchmarks/experts_prefill.py measures them."""


def choose(slots_per_expert: float) -> Config:
    return next(config for most, config in CONFIGS if slots_per_expert <= most)


def rows_in_act(
    x: torch.Tensor, slots: Slots | None, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as a product reads them, and no scales: tokens still need the order of its columns, and
    what FC1 wrote for the `slots` has it."""
    is_tiled = experts.up.scales is not None
    return reordered(x) if slots is None and is_tiled else x, None


def reordered(x: torch.Tensor) -> torch.Tensor:
    """Rows of x in the order of the columns of a product."""
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(x.numel()), 4096)
    _reorder[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block, num_warps=8)
    return out


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    slots: Slots,
    matrix: Matrix,
    out: torch.Tensor,
    config: Config,
    activation: Activation | None,
) -> torch.Tensor:
    """FC1 with an activation, from tokens x [T, K] to `out` [T * k, rows / 2] in sorted order; else
    FC2, from x [T * k, K] in sorted order to `out` [T * k, rows]. What belongs to no expert of this
    rank is not written. Returns `out`."""
    is_up = activation is not None
    tokens, depth = slots.lists.shape[1], x.shape[1]
    rows = out.shape[1] * (2 if is_up else 1)
    columns = min(config.columns, triton.next_power_of_2(rows))
    grid = (triton.cdiv(rows, columns), slots.blocks)
    options: dict[str, Any] = {
        "CHOSEN": len(out) // tokens,
        "M": rows,
        "K": depth,
        "ROWS": config.slots,
        "COLUMNS": columns,
        "UP": is_up,
        **activation_options(activation),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if matrix.scales is None:
        options["DEPTH"] = min(64, triton.next_power_of_2(depth))
        _rows_product[grid](x, *slots[:4], matrix.values, out, tokens, **options)
    else:
        split = Split(depth)
        options |= {"PARTS": split.parts, "GROUPS": split.groups_per_part}
        options |= {"LOADS": split.loads, "OCTETS": split.octets, "EXACT": exactly(out)}
        scales = matrix.scales.view(torch.uint8)
        _tiles_product[grid](
            x, x_scale, *slots[:4], matrix.values, scales, matrix.largest, out, tokens, **options
        )
    return out


@triton.jit
def _reorder(x, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + element_of(at), mask=at < total), mask=at < total)


@triton.jit
def _block(plan, counts, first_rows):
    """(Expert, its first row in sorted order, first place in its list, its count) of this program's
    block; count 0: none."""
    block = tl.program_id(1)
    live = block < tl.load(plan)
    expert = tl.load(plan + 1 + 2 * block, mask=live, other=0)
    first = tl.load(plan + 2 + 2 * block, mask=live, other=0)
    count = tl.load(counts + expert, mask=live, other=0)
    return expert, tl.load(first_rows + expert), first, count


@triton.jit
def _registers(words):
    """The eight codes of a word as bf16 in four registers, times 2 ** -126."""
    kept: tl.constexpr = -0x7E3F7E40  # bits 15 and 8..6 of both halves
    sign: tl.constexpr = -0x7FFF8000
    r2 = ((words << 6) & 0x01C001C0) | ((words << 1) & sign)
    r3 = ((words >> 3) & 0x01C001C0) | ((words << 2) & sign)
    return words & kept, (words << 3) & kept, r2, r3


@triton.jit
def _registers_of_nibbles(words):
    """The same of a word that is packed for e4m3."""
    return _register(words, 2), _register(words, 1), _register(words, 0), _register(words, 3)


@triton.jit
def _register(words, NIBBLE: tl.constexpr):
    """The codes of a nibble and of that four further."""
    mask: tl.constexpr = -0x80000000
    held = words << (6 - 4 * NIBBLE) if NIBBLE < 2 else words >> (4 * NIBBLE - 6)
    sign = words << 8 if NIBBLE == 0 else words >> (8 * NIBBLE - 8)
    return (held & 0x01C001C0) | (sign & 0x8000) | ((words << (28 - 8 * NIBBLE)) & mask)


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


@triton.jit(do_not_specialize=("tokens",))
def _tiles_product(
    x,  # FC1: [T, K], FC2: [slots, K] act or e4m3, in the order of columns
    x_scale,  # e4m3: f32 of each row
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    first_rows,  # [experts] i32
    plan,
    words,  # packed
    scales,
    largest,  # [experts, M] u8 or None
    out,  # [slots, M or M / 2] act
    tokens,
    CHOSEN: tl.constexpr,
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
    expert, first_row, first, count = _block(plan, counts, first_rows)
    if count > 0:
        TILES: tl.constexpr = COLUMNS // 16
        act: tl.constexpr = out.dtype.element_ty
        place = first + tl.arange(0, ROWS)
        real = place < count
        lists += expert.to(tl.int64) * tokens
        source_row, row = ends(lists, first_row, place, real, CHOSEN, UP)
        source = x + source_row * K
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
        E4M3: tl.constexpr = largest is not None
        least = tl.zeros((TILES, 2, 8, 1), tl.int32)
        if largest is not None:
            at_row = half[None, :, None, None] * 8 + g[None, None, :, None]
            at_row += (tl.program_id(0) * COLUMNS + tl.arange(0, TILES) * 16)[:, None, None, None]
            if UP:  # a tile's upper rows are the up half's of the same columns
                at_row = at_row % 16 // 8 * (M // 2) + at_row // 16 * 8 + at_row % 8
            own = largest + expert.to(tl.int64) * M + at_row
            least = tl.load(own, mask=there[:, None, None, None], other=0).to(tl.int32) - 12
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
            byte = tl.maximum(byte.to(tl.int32) + least, 0)  # e4m3: a power above the least
            byte = tl.broadcast_to(byte[:, :, :, :, None], (TILES, 2, 8, 2, 4))
            w = _tile(held, byte, TILES, act, E4M3, EXACT)
            group = part * GROUPS + load * 2 + column // 32
            inside = (load * 2 + column // 32 < GROUPS) & (group < K // 32)
            values = tl.load(
                source[None, :] + (part * GROUPS + load * 2) * 32 + column[:, None],
                mask=inside[:, None] & real[None, :], other=0.0,
            )  # fmt: skip
            sums = tl.dot(w, values.to(act), sums, input_precision="ieee")
        if not EXACT:
            sums *= 9223372036854775808.0  # 2 ** 63
        if x_scale is not None:
            sums *= tl.load(x_scale + source_row, mask=real, other=0.0)[None, :]
        if UP:
            halves = tl.permute(tl.reshape(sums, (TILES, 2, 8, ROWS)), (0, 2, 3, 1))
            gate, up = tl.split(halves.to(act).to(tl.float32))
            done = tl.reshape(activate(gate, up, act, BETA, LINEAR_BETA), (TILES * 8, ROWS))
            element = tl.program_id(0) * (TILES * 8) + tl.arange(0, TILES * 8)
            inside = real[None, :] & (element < M // 2)[:, None]
            if x_scale is None:
                element = column_of(element)  # FC2 reads it as it is
            target = out + row[None, :] * (M // 2) + element[:, None]
            tl.store(target, done.to(act), mask=inside)
        else:
            element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
            target = out + row[None, :] * M + element[:, None]
            tl.store(target, sums.to(act), mask=real[None, :] & (element < M)[:, None])


@triton.jit
def _tile(
    words, byte, TILES: tl.constexpr, act: tl.constexpr, E4M3: tl.constexpr, EXACT: tl.constexpr
):
    """act [16 * TILES, 64] of words [TILES, half, g, parity, q] and their groups' scales."""
    r0, r1, r2, r3 = _registers_of_nibbles(words) if E4M3 else _registers(words)
    a0, b0 = _scaled(r0, byte, act, EXACT)
    a1, b1 = _scaled(r1, byte, act, EXACT)
    a2, b2 = _scaled(r2, byte, act, EXACT)
    a3, b3 = _scaled(r3, byte, act, EXACT)
    # Register 2 * h + c and its halves b: [..., q, b], then c, then h.
    first = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    second = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    whole = tl.join(first, second)  # [TILES, half, g, parity, q, b, c, h]
    return tl.reshape(tl.permute(whole, (0, 1, 2, 3, 7, 6, 4, 5)), (16 * TILES, 64))


@triton.jit(do_not_specialize=("tokens",))
def _rows_product(
    x,  # FC1: [T, K], FC2: [slots, K] act
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    first_rows,  # [experts] i32
    plan,
    matrices,  # [experts, M, K] act
    out,  # [slots, M or M / 2] act
    tokens,
    CHOSEN: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UP: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, first_row, first, count = _block(plan, counts, first_rows)
    if count > 0:
        act: tl.constexpr = out.dtype.element_ty
        place = first + tl.arange(0, ROWS)
        real = place < count
        lists += expert.to(tl.int64) * tokens
        source_row, row = ends(lists, first_row, place, real, CHOSEN, UP)
        element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = element < M
        # Gate and up rows of a column stand next to each other.
        own = element % 2 * (M // 2) + element // 2 if UP else element
        matrix = matrices + (expert.to(tl.int64) * M + own)[:, None] * K
        source = x + source_row * K
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
