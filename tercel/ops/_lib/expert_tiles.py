"""The packed form that the expert kernels share: MXFP4 in tiles of 16 rows, made once at load.

A tile is 16 rows by all of K. Each of `parts` warps reads a run of K's groups of 32, two groups at
a time: lane 4 * g + q of a warp reads the four words (row g, even group), (row g, odd group),
(row g + 8, even group), (row g + 8, odd group), 16 bytes next to its neighbour's. A word holds
elements 8 * q .. 8 * q + 7 of its group. That is how mma.sync m16n8k16 wants its first operand.

    words  [E, tiles, parts, loads, 32, 4] i32
    scales [E, tiles, parts, ceil(loads / 4), 32] i32: a lane's four bytes, of groups 2 * q and
           2 * q + 1 of eight, in the order of the words

In each half of a word, of elements 2 * j and 2 * j + 1 the magnitudes lie where a shift brings them
to bits 8..6 and the signs to bit 15: E2M1 as a (subnormal) bf16, times 2 ** -126.

For products with e4m3 a word holds its codes in other places (E4M3_WORD): magnitudes as nibbles,
which pick bytes of a table, and signs where the bytes want them. A scale is then the power of two
above a row's least, 1 for that; `pack_for_e4m3` makes this form.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from tercel.core import mxfp4
from tercel.errors import ContractError
from tercel.ops._lib.experts import dequantized

GROUPS_PER_WARP = 14
"""Most that a warp reads: 7 loads of 16 bytes a lane, with which 64 registers suffice."""

MAX_SCALE = 191
"""The largest scale byte whose values, 2 ** 63 times smaller, bf16 holds."""

MAGNITUDE_BITS = (6, 3, 0, 9)
"""Lowest bit of the magnitude of element 2 * j in a word; of element 2 * j + 1, 16 more."""
SIGN_BITS = (15, 12, 14, 13)
"""Bit of the sign, likewise."""

SPAN = 11
"""Binades below a row's largest scale that e4m3 tells apart."""


@dataclass(frozen=True)
class Word:
    """Where a word holds the eight codes."""

    magnitudes: tuple[int, ...]
    """Lowest bit of each element's magnitude."""
    signs: tuple[int, ...]


BF16_WORD = Word(
    *(tuple(bit + half for bit in bits for half in (0, 16)) for bits in (MAGNITUDE_BITS, SIGN_BITS))
)
E4M3_NIBBLES = (2, 1, 0, 3)
"""Of elements 2 * j; those of 2 * j + 1 are four further."""
E4M3_WORD = Word(
    tuple(4 * nibble + half for nibble in E4M3_NIBBLES for half in (0, 16)),
    tuple(8 * nibble + bit for nibble in E4M3_NIBBLES for bit in (7, 3)),
)


@dataclass(frozen=True)
class Split:
    """How the groups of a row of `depth` elements are dealt to warps."""

    depth: int

    @property
    def groups(self) -> int:
        return self.depth // mxfp4.BLOCK

    @property
    def parts(self) -> int:
        """Warps per tile, a power of two."""
        parts = 1
        while -(-self.groups // parts) > GROUPS_PER_WARP:
            parts *= 2
        return parts

    @property
    def groups_per_part(self) -> int:
        return -(-self.groups // self.parts)

    @property
    def loads(self) -> int:
        """Of two groups each, per part."""
        return -(-self.groups_per_part // 2)

    @property
    def octets(self) -> int:
        """Groups of eight groups, which share one load of scales, per part."""
        return -(-self.loads // 4)


def pack(
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """The six weight arguments as the kernels read them: MXFP4 in tiles, bit for bit; bf16 as it
    is; NVFP4 as its values in `dtype`, which its second scale makes round once."""
    if w13_scale is None or w2_scale is None or w13_scale_2 is not None:
        return (
            dequantized(w13, w13_scale, w13_scale_2, dtype),
            None,
            dequantized(w2, w2_scale, w2_scale_2, dtype),
            None,
            None,
            None,
        )
    _check(w13_scale)
    _check(w2_scale)
    return (*_packed(w13, w13_scale, w2, w2_scale, BF16_WORD), None, None)


def pack_mxfp4(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """`pack` of the four weight arguments of an op that takes nothing but MXFP4."""
    return pack(w13, w13_scale, w2, w2_scale, dtype=dtype)[:4]


def packed_bytes(
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> int:
    """Bytes of the packed form, from shapes alone."""
    if w13_scale is None or w13_scale_2 is not None:
        values = sum(w.numel() * (1 if w13_scale is None else 2) for w in (w13, w2))
        return values * dtype.itemsize
    return _tile_bytes(w13) + _tile_bytes(w2)


def pack_for_e4m3(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """MXFP4 in tiles for e4m3, and the largest scale of every row."""
    largest = [scale.amax(-1) for scale in (w13_scale, w2_scale)]
    powers = [_powers(*each) for each in zip((w13_scale, w2_scale), largest, strict=True)]
    return (*_packed(w13, powers[0], w2, powers[1], E4M3_WORD), *largest)


def packed_bytes_for_e4m3(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> int:
    """Bytes of that form, from shapes alone."""
    rows = sum(scale.shape[0] * scale.shape[1] for scale in (w13_scale, w2_scale))
    return packed_bytes(w13, w13_scale, w2, w2_scale, dtype=dtype) + rows


def _powers(scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """u8, one more than the binades of each scale above SPAN below its row's largest."""
    above = scale.int() - largest.int()[..., None] + SPAN
    return (above.clamp_min(0) + 1).to(torch.uint8)


def _packed(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    word: Word,
) -> tuple[torch.Tensor, ...]:
    """Words and scales of both matrices, an expert after another, which bounds the memory."""
    matrices = ((_of_gate_up, w13, w13_scale), (_of_down, w2, w2_scale))
    made: list[torch.Tensor] = []
    for tiles, codes, scale in matrices:
        each = [tiles(codes[i : i + 1], scale[i : i + 1], word) for i in range(len(codes))]
        made += [torch.cat(parts) for parts in zip(*each, strict=True)]
    return tuple(made)


def _check(scale: torch.Tensor) -> None:
    if scale.device.type != "meta" and bool((scale > MAX_SCALE).any()):
        raise ContractError(
            f"experts: a scale byte of {int(scale.max())}; kernels hold values of scales up to "
            f"{MAX_SCALE}, 2 ** {MAX_SCALE - mxfp4.BIAS}"
        )


def _tile_bytes(codes: torch.Tensor) -> int:
    experts, rows, packed = codes.shape
    split = Split(2 * packed)
    return experts * rows // 16 * split.parts * (512 * split.loads + 128 * split.octets)


def _of_gate_up(codes: torch.Tensor, scale: torch.Tensor, word: Word) -> tuple[torch.Tensor, ...]:
    """Rows 0..7 of a tile are the gate's, 8..15 the up half's of the same columns."""
    both = (torch.unflatten(t, 1, (2, -1, 8)).transpose(1, 2) for t in (codes, scale))
    return _tiles(*both, word=word)


def _of_down(codes: torch.Tensor, scale: torch.Tensor, word: Word) -> tuple[torch.Tensor, ...]:
    both = (torch.unflatten(t, 1, (-1, 2, 8)) for t in (codes, scale))
    return _tiles(*both, word=word)


def _tiles(codes: torch.Tensor, scale: torch.Tensor, *, word: Word) -> tuple[torch.Tensor, ...]:
    """Words and scales of codes [E, tiles, 2, 8, K / 2] and scale [E, tiles, 2, 8, K / 32]."""
    split = Split(2 * codes.shape[-1])
    grouped = torch.unflatten(codes, -1, (split.groups, mxfp4.BLOCK // 2))
    dealt = _dealt(grouped, split, 2 * split.loads)  # [E, tiles, half, g, part, group, 16]
    words = _words(torch.unflatten(dealt, -1, (4, 4)), word)  # [E, tiles, half, g, part, group, q]
    words = torch.unflatten(words, 5, (split.loads, 2)).permute(0, 1, 4, 5, 3, 7, 2, 6)
    scales = _dealt(scale[..., None], split, 8 * split.octets)[..., 0]
    scales = torch.unflatten(scales, -1, (split.octets, 4, 2)).permute(0, 1, 4, 5, 3, 6, 2, 7)
    words, scales = (t.flatten(4, 5).flatten(5, 6).contiguous() for t in (words, scales))
    return words, scales.view(torch.int32)[..., 0]


def _dealt(values: torch.Tensor, split: Split, held: int) -> torch.Tensor:
    """[..., groups, n] -> [..., parts, held, n], with zeros where a part has fewer groups."""
    missing = split.parts * split.groups_per_part - split.groups
    full = pad(values, (0, 0, 0, missing))
    full = torch.unflatten(full, -2, (split.parts, split.groups_per_part))
    return pad(full, (0, 0, 0, held - split.groups_per_part))


def _words(codes: torch.Tensor, word: Word) -> torch.Tensor:
    """i32 [...] of the four bytes [..., 4] of eight consecutive codes."""
    tables = _tables(word).to(codes.device)
    index = codes.int()
    parts = [tables[j].index_select(0, index[..., j].flatten()) for j in range(4)]
    return (parts[0] | parts[1] | parts[2] | parts[3]).view(codes.shape[:-1])


def _tables(word: Word) -> torch.Tensor:
    """[4, 256] i32: what byte j of eight codes adds to their word."""
    byte = torch.arange(256)
    rows = []
    for j in range(4):
        row = torch.zeros_like(byte)
        for element, code in ((2 * j, byte & 15), (2 * j + 1, byte >> 4)):
            row |= (code & 7) << word.magnitudes[element] | (code >> 3) << word.signs[element]
        rows.append(row)
    return torch.stack(rows).to(torch.int32)
