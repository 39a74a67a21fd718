"""Products of a row with tiles of MXFP4 weights (expert_tiles.py), without multiplying them out.

A word becomes four bf16 pairs by shifts and masks, as subnormal numbers 2 ** 126 too small, and
activations are 2 ** 90 too large to make up for most of it; both are exact. The eight columns of an
mma are eight groups of 32 of the same row of x: the product with group G is right in column G only,
lane q == G // 2 of four keeps it, and scales are multiplied once for eight groups. So a lane holds
eight elements of one group of x, as four pairs.

What x is, FORM says:

    act      activations
    wide     the same, but for tensor cores already 2 ** 90 too large
    mxfp8    e4m3 codes with a scale per group
    rounded  fp32, which a lane rounds to MXFP8; eight elements in the order 0 2 4 6 1 3 5 7

`EXACT` is the same sum in fp32, without tensor cores: for fp32 activations, and what the
interpreter runs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_mxfp8 import (
    exponent_byte,
    inverse,
    magnitude,
    power_of_two,
)


def exactly(x: torch.Tensor) -> bool:
    """Whether products run in fp32 without tensor cores."""
    narrow = x.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    return not narrow or x.device.type == "cpu"


def split_options(split: Split) -> dict[str, Any]:
    """What `tile_sums` and the loads need to know of it."""
    return {
        "PARTS": split.parts,
        "GROUPS": split.groups_per_part,
        "LOADS": split.loads,
        "OCTETS": split.octets,
    }


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
    """Of weights, which are read once and leave the L2 cache first."""
    if mask is None:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def tile_words(tile, LOADS: tl.constexpr, mask):
    """A lane's loads of a tile, all under way at once."""
    held = ()
    for load in tl.static_range(LOADS):
        held = held + (_load(tile + load * 128, mask),)  # noqa: RUF005
    return held


@triton.jit
def tile_scales(scales, OCTETS: tl.constexpr, mask):
    held = ()
    for octet in tl.static_range(OCTETS):
        held = held + (_load(scales + octet * 128, mask),)  # noqa: RUF005
    return held


@triton.jit
def tile_sums(
    words,
    scales,
    x,  # [rows, 1] pointers to the slot's row of activations
    x_scale,  # the same to its scales, where FORM is mxfp8
    live,  # [rows, 1] whether the slot is real
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """[SLOTS, 8, 2] fp32: the products of 16 rows, g and half."""
    ROWS: tl.constexpr = SLOTS * PARTS * 32
    row = tl.arange(0, ROWS)
    part = (row // 32) % PARTS
    last = tl.minimum((part + 1) * GROUPS, K // 32)
    total = tl.zeros((ROWS, 4), tl.float32)
    for octet in tl.static_range(OCTETS):
        group = (part * GROUPS + row % 32 // 4 + octet * 8)[:, None]  # of the lane
        element = (part * (GROUPS * 32) + row % 32 * 8 + octet * 256)[:, None]  # its first
        inside = (group < last[:, None]) & live
        if EXACT:
            low, high = _pairs(x, x_scale, group, element, inside, FORM, 0)
            sums = tl.zeros((ROWS, 4), tl.float32)
            for load in tl.static_range(4):
                if octet * 4 + load < LOADS:
                    products = _exact(words[octet * 4 + load], low, high, load)
                    # As after an mma, lane q holds the sums of load q.
                    quad = tl.reshape(products, (ROWS // 4, 4, 4))
                    summed = tl.sum(quad, 1)[:, None, :]
                    spread = tl.reshape(tl.broadcast_to(summed, (ROWS // 4, 4, 4)), (ROWS, 4))
                    sums = tl.where((row % 4 == load)[:, None], spread, sums)
        else:
            own = _bf16_pairs(x, x_scale, group, element, inside, FORM)
            sums = _product(words[octet * 4], own, row[:, None], 0)
            for load in tl.static_range(1, 4):
                if octet * 4 + load < LOADS:
                    sums = _product(words[octet * 4 + load], own, sums, load)
        total += sums * power_of_two(scales[octet])
    parts = tl.reshape(total, (SLOTS, PARTS, 8, 4, 2, 2))
    summed = tl.sum(tl.sum(tl.sum(parts, 5), 3), 1)
    return summed if EXACT else summed * 68719476736.0  # 2 ** 36


@triton.jit
def _bf16_pairs(x, x_scale, group, element, inside, FORM: tl.constexpr):
    """A lane's four pairs of bf16, times 2 ** 90."""
    if FORM == "act" or FORM == "wide":
        at = x.to(tl.pointer_type(tl.int32)) + (element // 2 + tl.arange(0, 4)[None, :])
        pairs = tl.load(at, mask=inside, other=0)
        if FORM == "act":
            pairs = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, 0x6C806C80],
                tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return pairs
    low, high = _pairs(x, x_scale, group, element, inside, FORM, 90)
    low, high = (low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True))
    return ((low >> 16) | (high & 0xFFFF0000)).to(tl.int32, bitcast=True)


@triton.jit
def _pairs(x, x_scale, group, element, inside, FORM: tl.constexpr, EXPONENT: tl.constexpr):
    """The first and the second elements [rows, 4] of a lane's pairs in fp32; values of MXFP8 times
    2 ** EXPONENT, unless they are wide."""
    word = tl.arange(0, 4)[None, :]
    ROWS: tl.constexpr = element.shape[0]
    if FORM == "act" or FORM == "wide":
        low = tl.load(x + (element + 2 * word), mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x + (element + 2 * word + 1), mask=inside, other=0.0).to(tl.float32)
        return low, high
    if FORM == "mxfp8":
        codes = tl.load(x + (element + tl.arange(0, 8)[None, :]), mask=inside, other=0)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        byte = tl.load(x_scale + group, mask=inside, other=0)
        low, high = tl.split(tl.reshape(values * power_above(byte, EXPONENT), (ROWS, 4, 2)))
        return low, high
    low = tl.load(x + (element + word), mask=inside, other=0.0)
    high = tl.load(x + (element + 4 + word), mask=inside, other=0.0)
    # Four lanes hold a group.
    quads = tl.reshape(low, (ROWS // 4, 4, 4)), tl.reshape(high, (ROWS // 4, 4, 4))
    largest = tl.maximum(magnitude(quads[0]), magnitude(quads[1]))
    largest = tl.max(tl.max(largest, 2), 1)[:, None, None]
    byte = exponent_byte(largest)
    scale, power = inverse(largest, byte), power_above(byte, EXPONENT)
    low = (quads[0] * scale).to(tl.float8e4nv).to(tl.float32) * power
    high = (quads[1] * scale).to(tl.float8e4nv).to(tl.float32) * power
    return tl.reshape(low, (ROWS, 4)), tl.reshape(high, (ROWS, 4))


@triton.jit
def power_above(byte, EXPONENT: tl.constexpr):
    """2 ** (byte - 127 + EXPONENT), infinite where fp32 does not hold it."""
    return power_of_two(tl.minimum(byte.to(tl.int32) + EXPONENT, 255))


@triton.jit
def _exact(words, low, high, LOAD: tl.constexpr):
    """fp32 products [rows, 4] of one load with the lane's eight elements of its two groups."""
    ROWS: tl.constexpr = words.shape[0]
    SHAPE: tl.constexpr = (ROWS // 32, 8, 4, 2, 2)  # warp, g, q, half of the tile, group
    of = tl.reshape(words, SHAPE)
    sums = tl.zeros(SHAPE, tl.float32)
    for element in tl.static_range(8):
        mine = low if element % 2 == 0 else high
        here = tl.arange(0, 4)[None, :] == element // 2
        mine = tl.reshape(tl.sum(tl.where(here, mine, 0.0), 1), (ROWS // 32, 8, 4))
        group = tl.arange(0, 8)[None, :, None]
        even = tl.sum(tl.where(group == 2 * LOAD, mine, 0.0), 1)
        odd = tl.sum(tl.where(group == 2 * LOAD + 1, mine, 0.0), 1)
        both = tl.where(tl.arange(0, 2)[None, None, :] == 0, even[:, :, None], odd[:, :, None])
        sums += _element(of, element) * both[:, None, :, None, :]
    return tl.reshape(sums, (ROWS, 4))


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
