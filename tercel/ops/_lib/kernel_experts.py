"""The routed experts of a few tokens in two launches, for MXFP4 in tiles and for plain matrices.

    FC1: a program computes eight columns of h = act(activation(act(w13 @ z))) for one slot
    FC2: a program computes 16 or fewer elements of y for one token: all of its slots, in order

A token's slots of this rank are few, so a program finds them itself among the token's ids. Each
element of y is one program's, which is why no result depends on the order of programs.

MXFP4 goes through tensor cores without being multiplied out: a word becomes four bf16 pairs by
shifts and masks, as subnormal numbers 2 ** 126 too small, and activations are 2 ** 90 too large to
make up for most of it; both are exact. The eight columns of an mma are eight groups of 32 of the
same row of x: the product with group G is right in column G only, lane q == G // 2 of four keeps
it, and scales are multiplied once for eight groups. `EXACT` is the same sum in fp32, without
tensor cores: for fp32 activations, and what the interpreter runs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.expert_tiles import Split

MAX_WARPS = 16
"""Of FC2."""


class Slots(NamedTuple):
    """Which experts each token wants, with what weights, and which of them are here."""

    ids: torch.Tensor
    weights: torch.Tensor
    first_expert: int


class Activation(NamedTuple):
    name: str
    beta: float | None
    linear_beta: float | None


class Config(NamedTuple):
    """How the two launches are cut into programs."""

    turns: int
    """In how many turns a program of either takes its expected slots."""
    registers: int | None
    """Per thread, at most: with 64, 32 warps fit a multiprocessor."""


CONFIGS: tuple[tuple[int, Config], ...] = (
    (2, Config(turns=1, registers=None)),
    (1 << 30, Config(turns=2, registers=64)),
)
"""The first row whose limit on tokens holds decides; benchmarks/experts.py measures them.
One token is bound by latency, which spilled registers lengthen; many by the number of warps."""
COLUMNS_PER_TOKEN = 384
"""Programs of FC1 for a token's local slots, on average, in every layout of Kimi K3."""


def choose(tokens: int) -> Config:
    return next(config for most, config in CONFIGS if tokens <= most)


def _slots_at_once(width: int, chosen: int, config: Config) -> int:
    """Of a token, whose local slots are the fewer the wider experts are: ranks that divide experts
    among them do not divide their width."""
    expected = min(max(8 * COLUMNS_PER_TOKEN // width, 1), chosen)
    return triton.next_power_of_2(max(expected // config.turns, 1))


def few_tokens(
    z: torch.Tensor,
    slots: Slots,
    weights: tuple[torch.Tensor | None, ...],
    activation: Activation,
    *,
    ids_early: bool = False,
    config: Config | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts [T, L]; `weights` in the packed form.

    Args:
        ids_early: FC1 reads the ids before it waits for the previous launch.
    """
    config = config or choose(len(z))
    hidden = gate_up(z, slots, weights, activation, config, ids_early=ids_early)
    return down(hidden, slots, weights, z.shape[1], config)


def gate_up(
    z: torch.Tensor,
    slots: Slots,
    weights: tuple[torch.Tensor | None, ...],
    activation: Activation,
    config: Config,
    *,
    ids_early: bool = False,
) -> torch.Tensor:
    """FC1: [T * k, I] activated; slots of experts elsewhere are not written."""
    matrix, scales = weights[:2]
    tokens, latent = z.shape
    chosen = slots.ids.shape[1]
    width = matrix.shape[1] // 2 if scales is None else 8 * matrix.shape[1]
    hidden = torch.empty(tokens * chosen, width, dtype=z.dtype, device=z.device)
    columns = triton.cdiv(width, 8)
    chains = min(_slots_at_once(width, chosen, config), chosen)
    grid = (columns, chains, tokens)
    options = {
        **_sizes(chosen, width, latent),
        **activation_options(activation),
        "EARLY": ids_early,
        "CHAINS": chains,
    }
    experts = (slots.first_expert, len(matrix))
    if scales is None:
        options |= {"ROWS": 8, "DEPTH": min(triton.next_power_of_2(latent), 1024), "num_warps": 8}
        _gate_up_rows[grid](z, slots.ids, matrix, hidden, *experts, **options)
        return hidden
    split = Split(latent)
    options |= {**_split(split), "EXACT": exactly(z), "num_warps": split.parts}
    options |= {"maxnreg": config.registers}
    _gate_up_tiles[grid](
        z, slots.ids, matrix, scales.view(torch.uint8), hidden, *experts, **options
    )
    return hidden


def down(
    hidden: torch.Tensor,
    slots: Slots,
    weights: tuple[torch.Tensor | None, ...],
    latent: int,
    config: Config,
) -> torch.Tensor:
    """FC2 and the weighted sum over a token's slots."""
    matrix, scales = weights[2:4]
    tokens, chosen = slots.ids.shape
    width = hidden.shape[1]
    y = torch.empty(tokens, latent, dtype=hidden.dtype, device=hidden.device)
    options = _sizes(chosen, width, latent)
    given = (hidden, slots.ids, slots.weights, matrix)
    experts = (slots.first_expert, len(matrix))
    if scales is None:
        options |= {"ROWS": 4, "DEPTH": min(triton.next_power_of_2(width), 1024)}
        options |= {"SLOTS": min(4, triton.next_power_of_2(chosen)), "num_warps": 8}
        _down_rows[(triton.cdiv(latent, 4), tokens)](*given, y, *experts, **options)
        return y
    split = Split(width)
    at_once = min(_slots_at_once(width, chosen, config), max(MAX_WARPS // split.parts, 1))
    options |= {**_split(split), "EXACT": exactly(hidden), "SLOTS": at_once}
    options |= {"num_warps": at_once * split.parts, "maxnreg": config.registers}
    _down_tiles[(latent // 16, tokens)](*given, scales.view(torch.uint8), y, *experts, **options)
    return y


def activation_options(activation: Activation | None) -> dict[str, Any]:
    """What `activate` needs to know; None: nothing is activated."""
    if activation is None:
        return {"SILU": False, "BETA": 1.0, "LINEAR_BETA": 0.0}
    return {
        "SILU": activation.name == "silu",
        "BETA": activation.beta or 1.0,
        "LINEAR_BETA": activation.linear_beta or 0.0,
    }


def exactly(x: torch.Tensor) -> bool:
    """Whether products run in fp32 without tensor cores."""
    return x.dtype != torch.bfloat16 or x.device.type == "cpu"


def _sizes(chosen: int, width: int, latent: int) -> dict[str, Any]:
    return {
        "CHOSEN": chosen,
        "WIDTH": width,
        "LATENT": latent,
        "num_stages": 1,
        "launch_pdl": True,
    }


def _split(split: Split) -> dict[str, Any]:
    return {
        "PARTS": split.parts,
        "GROUPS": split.groups_per_part,
        "LOADS": split.loads,
        "OCTETS": split.octets,
    }


@triton.jit
def _local_slots(ids, first_expert, experts, CHOSEN: tl.constexpr):
    """The token's slots whose expert is here, one bit each."""
    slot = tl.arange(0, 32)  # a whole warp sums integers in one instruction
    local = tl.load(ids + slot, mask=slot < CHOSEN, other=-1) - first_expert
    inside = (slot < CHOSEN) & (local >= 0) & (local < experts)
    return tl.sum(tl.where(inside, 1 << slot, 0), 0)


@triton.jit
def _without_first(slots, count, MOST: tl.constexpr):
    """`slots` without the `count` lowest, at most MOST."""
    for index in tl.static_range(MOST):
        slots = tl.where(index < count, slots & (slots - 1), slots)
    return slots


@triton.jit
def _first(slots):
    """The number of the lowest bit, from the exponent of its value; 0 where there is none."""
    bit = (slots & -slots).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((bit >> 23) - 127, 0)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Without a loss of digits near zero."""
    small = x * (1 - x * x * (1 / 3 - x * x * (2 / 15 - x * x * (17 / 315))))
    return tl.where(tl.abs(x) < 0.15, small, 2 * _sigmoid(2 * x) - 1)


@triton.jit
def activate(gate, up, act: tl.constexpr, SILU: tl.constexpr, BETA, LINEAR_BETA: tl.constexpr):
    """The gated product in fp32 of fp32 values; rounded as silu_mul rounds, inside."""
    if SILU:
        return (gate * _sigmoid(gate)).to(act).to(tl.float32) * up
    product = _sigmoid(gate) * (BETA * _tanh(gate / BETA))
    if LINEAR_BETA == 0.0:
        return product * up
    return product * (LINEAR_BETA * _tanh(up / LINEAR_BETA))


@triton.constexpr_function
def _mma(pair, first):
    """PTX of two groups' products: 4 words, 4 pairs of x, then the kept sums, or the row of the
    tensor where nothing is kept yet."""
    dequantized = """
        and.b32 {r}0, {w}, 0x81C081C0;
        shl.b32 t, {w}, 3;
        and.b32 {r}1, t, 0x81C081C0;
        shl.b32 t, {w}, 6;
        shl.b32 u, {w}, 1;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 {r}2, u, 0x80008000, t, 0xEA;
        shr.u32 t, {w}, 3;
        shl.b32 u, {w}, 2;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 {r}3, u, 0x80008000, t, 0xEA;
    """
    multiplied = """
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {{{d}0, {d}1, {d}2, {d}3}}, {{a0, b0, a1, b1}}, {{$8, $9}}, {{z, z, z, z}};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {{{d}0, {d}1, {d}2, {d}3}}, {{a2, b2, a3, b3}}, {{$10, $11}},
            {{{d}0, {d}1, {d}2, {d}3}};
    """
    text = """{
        .reg .b32 t, u, lane, a<4>, b<4>;
        .reg .f32 z, c<4>, d<4>;
        .reg .pred p, wrong;
        mov.f32 z, 0f00000000;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 3;
        setp.eq.u32 p, lane, PAIR;
    """.replace("PAIR", str(pair))
    for d, row, below in (("c", "$4", "$6"), ("d", "$5", "$7")):
        text += dequantized.format(r="a", w=row) + dequantized.format(r="b", w=below)
        text += multiplied.format(d=d)
    for out, d in (("$0", "c0"), ("$1", "d1"), ("$2", "c2"), ("$3", "d3")):
        kept = "z" if first else "$1" + str(2 + int(out[1]))
        text += f"selp.f32 {out}, {d}, {kept}, p;\n"
    if first:
        # The compiler chooses which lane holds which element; another choice gives NaN.
        text += "mov.u32 t, %tid.x;\nsetp.ne.u32 wrong, t, $12;\n"
        text += "@wrong mov.f32 $0, 0f7FFFFFFF;\n"
    return text + "}"


@triton.jit
def _scaled_up(x):
    """bf16 pairs times 2 ** 90."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, 0x6C806C80], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _product(words, x, kept, PAIR: tl.constexpr):
    """Group sums of lanes with q == PAIR; other lanes keep `kept`, which at first is the row."""
    if PAIR == 0:
        return tl.inline_asm_elementwise(
            _mma(0, True), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r", [words, x, kept],
            tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        _mma(PAIR, False), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f", [words, x, kept],
        tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _load(at, mask):
    return tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)


@triton.jit
def _words(tile, LOADS: tl.constexpr, mask):
    """A lane's loads of a tile, all under way at once."""
    held = ()
    for load in tl.static_range(LOADS):
        held = held + (_load(tile + load * 128, mask),)  # noqa: RUF005
    return held


@triton.jit
def _scales(scales, OCTETS: tl.constexpr, mask):
    held = ()
    for octet in tl.static_range(OCTETS):
        held = held + (_load(scales + octet * 128, mask),)  # noqa: RUF005
    return held


@triton.jit
def _power_of_two(scale):
    """2 ** (scale - 127); 0 for the byte 0."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile_sums(
    words,
    scales,
    x,  # [rows, 1] pointers to the slot's row of activations
    live,  # [rows, 1] whether the slot is real
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    K: tl.constexpr,
    EXACT: tl.constexpr,
):
    """[SLOTS, 8, 2] fp32: the products of 16 rows, g and half."""
    ROWS: tl.constexpr = SLOTS * PARTS * 32
    row = tl.arange(0, ROWS)
    group = (row // 32) % PARTS * GROUPS + row % 32 // 4  # of the lane, in the first octet
    last = tl.minimum(((row // 32) % PARTS + 1) * GROUPS, K // 32)
    word = tl.arange(0, 4)
    total = tl.zeros((ROWS, 4), tl.float32)
    for octet in tl.static_range(OCTETS):
        if EXACT:
            base = (row // 32) % PARTS * GROUPS + octet * 8
            sums = tl.zeros((ROWS, 4), tl.float32)
            for load in tl.static_range(4):
                if octet * 4 + load < LOADS:
                    products = _exact(words[octet * 4 + load], x, base + 2 * load, last, row, live)
                    # As after an mma, lane q holds the sums of load q.
                    quad = tl.reshape(products, (ROWS // 4, 4, 4))
                    summed = tl.sum(quad, 1)[:, None, :]
                    spread = tl.reshape(tl.broadcast_to(summed, (ROWS // 4, 4, 4)), (ROWS, 4))
                    sums = tl.where((row % 4 == load)[:, None], spread, sums)
        else:
            pairs = x.to(tl.pointer_type(tl.int32)) + (
                (octet * 128 + (row // 32) % PARTS * (GROUPS * 16) + row % 32 * 4)[:, None]
                + word[None, :]
            )
            inside = (group + octet * 8 < last) & (row % 32 // 4 + octet * 8 < GROUPS)
            own = _scaled_up(tl.load(pairs, mask=inside[:, None] & live, other=0))
            sums = _product(words[octet * 4], own, row[:, None], 0)
            for load in tl.static_range(1, 4):
                if octet * 4 + load < LOADS:
                    sums = _product(words[octet * 4 + load], own, sums, load)
        total += sums * _power_of_two(scales[octet])
    parts = tl.reshape(total, (SLOTS, PARTS, 8, 4, 2, 2))
    summed = tl.sum(tl.sum(tl.sum(parts, 5), 3), 1)
    return summed if EXACT else summed * 68719476736.0  # 2 ** 36


@triton.jit
def _exact(words, x, base, last, row, live):
    """fp32 products of one load, of the lane's eight elements."""
    word = tl.arange(0, 4)
    group = base[:, None] + (word % 2)[None, :]
    inside = (group < last[:, None]) & live
    sums = tl.zeros(words.shape, tl.float32)
    for element in tl.static_range(8):
        value = _element(words, element)
        at = x + (group * 32 + (row % 4 * 8 + element)[:, None])
        sums += value * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _element(words, ELEMENT: tl.constexpr):
    """The fp32 value of one of a word's eight codes."""
    MAGNITUDE: tl.constexpr = _bit(0, ELEMENT)
    SIGN: tl.constexpr = _bit(1, ELEMENT)
    code = (words >> MAGNITUDE) & 7
    exponent = code >> 1
    normal = ((exponent + 126) << 23 | (code & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, (code & 1) * 0.5, normal)
    return tl.where(((words >> SIGN) & 1) == 1, -value, value)


@triton.constexpr_function
def _bit(which, element):
    from tercel.ops._lib.expert_tiles import MAGNITUDE_BITS, SIGN_BITS

    return (MAGNITUDE_BITS, SIGN_BITS)[which][element // 2] + 16 * (element % 2)


@triton.jit
def _gate_up_slot(
    z, ids, words, scales, hidden, first_expert, slot, column,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    EXACT: tl.constexpr,
    SILU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
):  # fmt: skip
    """Eight columns of one slot's row of `hidden`."""
    row = tl.arange(0, PARTS * 32)
    word = tl.arange(0, 4)
    lane = (row // 32 * (LOADS * 128) + row % 32 * 4)[:, None] + word[None, :]
    scale_lane = (row // 32 * (OCTETS * 128) + row % 32 * 4)[:, None] + word[None, :]
    expert = tl.load(ids + slot) - first_expert
    tile = expert.to(tl.int64) * (WIDTH // 8) + column
    held = _words(words + tile * (PARTS * LOADS * 128) + lane, LOADS, None)
    held_scales = _scales(scales + tile * (PARTS * OCTETS * 128) + scale_lane, OCTETS, None)
    if EARLY:
        cuda.gdc_wait()  # z is the previous kernel's
        cuda.gdc_launch_dependents()
    x = z + slot // CHOSEN * LATENT + tl.zeros_like(row)[:, None]
    sums = _tile_sums(
        held, held_scales, x, (row >= 0)[:, None],
        1, PARTS, GROUPS, LOADS, OCTETS, LATENT, EXACT,
    )  # fmt: skip
    act: tl.constexpr = hidden.dtype.element_ty
    gate, up = tl.split(tl.reshape(sums, (8, 2)).to(act).to(tl.float32))
    activated = activate(gate, up, act, SILU, BETA, LINEAR_BETA)
    tl.store(hidden + slot * WIDTH + column * 8 + tl.arange(0, 8), activated.to(act))


@triton.jit
def _gate_up_tiles(
    z,  # [T, LATENT] act
    ids,  # [T, CHOSEN] i64
    words,  # packed
    scales,
    hidden,  # [T * CHOSEN, WIDTH] act
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    EXACT: tl.constexpr,
    SILU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    CHAINS: tl.constexpr,
):
    column = tl.program_id(0)
    token = tl.program_id(2)
    if not EARLY:
        cuda.gdc_wait()  # the ids are the previous kernel's
        cuda.gdc_launch_dependents()
    slots = _local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    slots = _without_first(slots, tl.program_id(1), CHAINS - 1)
    while slots != 0:
        _gate_up_slot(
            z, ids, words, scales, hidden, first_expert, token * CHOSEN + _first(slots),
            column, CHOSEN, WIDTH, LATENT, EXACT, SILU, BETA, LINEAR_BETA, EARLY,
            PARTS, GROUPS, LOADS, OCTETS,
        )  # fmt: skip
        slots = _without_first(slots, CHAINS, CHAINS)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def _down_tiles(
    hidden,  # [T * CHOSEN, WIDTH] act
    ids,  # [T, CHOSEN] i64
    weights,  # [T, CHOSEN] f32
    words,  # packed
    scales,
    y,  # [T, LATENT] act
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    column = tl.program_id(0)
    token = tl.program_id(1)
    cuda.gdc_launch_dependents()
    # FC1 waits before it lets this kernel start, so that the ids are there.
    slots = _local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    row = tl.arange(0, SLOTS * PARTS * 32)
    word = tl.arange(0, 4)
    in_part = row % (PARTS * 32)
    lane = (in_part // 32 * (LOADS * 128) + row % 32 * 4)[:, None] + word[None, :]
    scale_lane = (in_part // 32 * (OCTETS * 128) + row % 32 * 4)[:, None] + word[None, :]
    act: tl.constexpr = y.dtype.element_ty
    total = tl.zeros((8, 2), tl.float32)
    while slots != 0:
        own = _without_first(slots + 0 * row[:, None], row[:, None] // (PARTS * 32), SLOTS - 1)
        live = own != 0
        slot = token * CHOSEN + _first(own)
        expert = tl.load(ids + slot, mask=live, other=first_expert) - first_expert
        tile = expert * (LATENT // 16) + column  # i64, as the ids are
        held = _words(words + (tile * (PARTS * LOADS * 128) + lane), LOADS, live)
        held_scales = _scales(scales + (tile * (PARTS * OCTETS * 128) + scale_lane), OCTETS, live)
        cuda.gdc_wait()  # hidden is the previous kernel's
        sums = _tile_sums(
            held, held_scales, hidden + slot * WIDTH, live,
            SLOTS, PARTS, GROUPS, LOADS, OCTETS, WIDTH, EXACT,
        )  # fmt: skip
        index = tl.arange(0, SLOTS)
        left = _without_first(slots + 0 * index, index, SLOTS - 1)
        share = tl.load(weights + token * CHOSEN + _first(left), mask=left != 0, other=0.0)
        total += tl.sum(sums.to(act).to(tl.float32) * share[:, None, None], 0)
        slots = _without_first(slots, SLOTS, SLOTS)
    cuda.gdc_wait()
    element = column * 16 + tl.arange(0, 2)[None, :] * 8 + tl.arange(0, 8)[:, None]
    tl.store(y + token * LATENT + element, total.to(act))


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
def _gate_up_rows(
    z,  # [T, LATENT] act
    ids,  # [T, CHOSEN] i64
    matrices,  # [E, 2 * WIDTH, LATENT] act
    hidden,  # [T * CHOSEN, WIDTH] act
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    SILU: tl.constexpr,
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
    slots = _local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 2)
    row = half[:, None] * WIDTH + column[None, :]
    inside = (column < WIDTH)[None, :] & (half >= 0)[:, None]
    act: tl.constexpr = hidden.dtype.element_ty
    slots = _without_first(slots, tl.program_id(1), CHAINS - 1)
    while slots != 0:
        slot = token * CHOSEN + _first(slots)
        slots = _without_first(slots, CHAINS, CHAINS)
        expert = (tl.load(ids + slot) - first_expert).to(tl.int64)
        matrix = matrices + (expert * (2 * WIDTH) + row) * LATENT
        sums = _row_sums(matrix, z + token * LATENT + half * 0, inside, LATENT, DEPTH)
        gate, up = tl.split(tl.trans(sums.to(act).to(tl.float32)))
        activated = activate(gate, up, act, SILU, BETA, LINEAR_BETA)
        tl.store(hidden + slot * WIDTH + column, activated.to(act), mask=column < WIDTH)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def _down_rows(
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
    slots = _local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    act: tl.constexpr = y.dtype.element_ty
    total = tl.zeros((ROWS,), tl.float32)
    while slots != 0:
        index = tl.arange(0, SLOTS)
        own = _without_first(slots + 0 * index, index, SLOTS - 1)
        live = own != 0
        slot = token * CHOSEN + _first(own)
        expert = tl.load(ids + slot, mask=live, other=first_expert) - first_expert
        matrix = matrices + (expert.to(tl.int64)[:, None] * LATENT + row[None, :]) * WIDTH
        inside = live[:, None] & (row < LATENT)[None, :]
        sums = _row_sums(matrix, hidden + slot * WIDTH, inside, WIDTH, DEPTH)
        share = tl.load(weights + slot, mask=live, other=0.0)
        products = sums.to(act).to(tl.float32) * share[:, None]
        total += tl.sum(tl.where(live[:, None], products, 0.0), 0)
        slots = _without_first(slots, SLOTS, SLOTS)
    cuda.gdc_wait()
    tl.store(y + token * LATENT + row, total.to(act), mask=row < LATENT)
