"""The routed experts of a few tokens in two launches, for MXFP4 in tiles and for plain matrices.

    FC1: a program computes eight columns of h = act(activation(act(w13 @ z))) for one slot
    FC2: a program computes 16 or fewer elements of y for one token: all of its slots, in order

A token's slots of this rank are few, so a program finds them itself among the token's ids. Each
element of y is one program's, which is why no result depends on the order of programs.

With z in MXFP8, h stays in fp32 between the launches and FC2 rounds it to MXFP8; every program does
that anew, and where tokens are many, small launches do it once (kernel_expert_mxfp8.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_expert_mxfp8 import rounded, widened
from tercel.ops._lib.kernel_expert_rows import down_rows, gate_up_rows
from tercel.ops._lib.kernel_expert_tiles import (
    exactly,
    split_options,
    tile_scales,
    tile_sums,
    tile_words,
)
from tercel.ops._lib.kernel_local_slots import first, local_slots, without_first
from tercel.ops._lib.kernel_prefetch import LINE, prefetch_lines

MAX_WARPS = 16
"""Of FC2."""
FEW_TOKENS = 4


class Rows(NamedTuple):
    """What a product reads, one row per token or slot."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    """Of e4m3 codes, [rows, K / 32] u8."""
    form: str = "act"
    """As tile_sums names it: act, mxfp8 (codes), rounded or wide."""

    @property
    def act(self) -> torch.dtype:
        """Of the op's result."""
        return self.values.dtype if self.form == "act" else torch.bfloat16


class Slots(NamedTuple):
    """Which experts each token wants, with what weights, and which of them are here."""

    ids: torch.Tensor
    weights: torch.Tensor
    first_expert: int


class Config(NamedTuple):
    """How the two launches are cut into programs."""

    turns: int
    """In how many turns a program of either takes its expected slots."""
    registers: int | None
    """Per thread, at most: with 64, 32 warps fit a multiprocessor."""
    apart: bool = False
    """Whether rows of MXFP8 are made wide, and h rounded to MXFP8, by launches of their own."""


ONE = Config(turns=1, registers=None)
FEW = Config(turns=2, registers=None)
MANY = Config(turns=2, registers=64)
MANY_MXFP8 = Config(turns=2, registers=None, apart=True)
"""Chosen by measurement (benchmarks/experts.py): one token is bound by latency, which a second
turn, spilled registers and further launches lengthen; few by what a multiprocessor has in flight;
many by the number of warps, but behind a launch of their own, whose time their first loads hide,
registers are worth more."""
COLUMNS_PER_TOKEN = 384
"""Programs of FC1 for a token's local slots, on average, in every layout of Kimi K3."""


def choose(tokens: int, form: str) -> Config:
    """For rows of a form."""
    if tokens == 1:
        return ONE
    if form == "mxfp8":
        return MANY_MXFP8
    return FEW if tokens <= FEW_TOKENS else MANY


def _slots_at_once(width: int, chosen: int, config: Config) -> int:
    """Of a token, whose local slots are the fewer the wider experts are: ranks that divide experts
    among them do not divide their width."""
    expected = min(max(8 * COLUMNS_PER_TOKEN // width, 1), chosen)
    return triton.next_power_of_2(max(expected // config.turns, 1))


def experts_of_act(
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
    ids_early: bool = False,
) -> torch.Tensor:
    """As moe/experts_decode and moe/experts_stream, with their weights packed."""
    return few_tokens(
        Rows(z),
        Slots(ids, weights, first_expert),
        (w13, w13_scale, w2, w2_scale),
        Activation(activation, beta, linear_beta),
        ids_early=ids_early,
    )


def few_tokens(
    z: Rows,
    slots: Slots,
    weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
    activation: Activation,
    *,
    ids_early: bool = False,
    config: Config | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts [T, L]; `weights` in the packed form.

    Args:
        ids_early: FC1 may read the ids before it waits for the previous launch.
    """
    config = config or choose(len(z.values), z.form)
    if z.form == "mxfp8" and config.apart:
        assert z.scale is not None
        z = Rows(widened(z.values, z.scale, trigger_early=ids_early), form="wide")
        ids_early = True  # that launch lets FC1 start when it has waited, or ids are older
    # With so few registers that many programs fit, loads held across the wait would spill.
    ids_early = ids_early and config.registers is None
    hidden = gate_up(z, slots, weights[:2], activation, config, ids_early=ids_early)
    y = torch.empty(z.values.shape, dtype=z.act, device=hidden.values.device)
    if hidden.form == "rounded" and config.apart:
        here = (slots.first_expert, len(weights[0]))
        hidden = Rows(rounded(hidden.values, slots.ids, *here), form="wide")
    return down(hidden, slots, weights[2:], y, config)


def gate_up(
    z: Rows,
    slots: Slots,
    w13: tuple[torch.Tensor, torch.Tensor | None],
    activation: Activation,
    config: Config,
    *,
    ids_early: bool = False,
) -> Rows:
    """FC1: [T * k, I] activated, in fp32 where it is to be rounded to MXFP8; slots of experts
    elsewhere are not written."""
    matrix, scales = w13
    (tokens, latent), chosen = z.values.shape, slots.ids.shape[1]
    width = matrix.shape[1] // 2 if scales is None else 8 * matrix.shape[1]
    dtype = z.values.dtype if z.form == "act" else torch.float32
    hidden = torch.empty(tokens * chosen, width, dtype=dtype, device=slots.ids.device)
    chains = min(_slots_at_once(width, chosen, config), chosen)
    grid = (triton.cdiv(width, 8), chains, tokens)
    experts = (slots.first_expert, len(matrix))
    options = _sizes(chosen, width, latent) | activation_options(activation)
    options |= {"EARLY": ids_early, "CHAINS": chains}
    if scales is None:
        options |= {"ROWS": 8, "DEPTH": min(triton.next_power_of_2(latent), 1024), "num_warps": 8}
        gate_up_rows[grid](z.values, slots.ids, matrix, hidden, *experts, **options)
        return Rows(hidden)
    split = Split(latent)
    options |= _tile_options(split, 1, config)
    options |= {"FORM": z.form, "EXACT": exactly(z.values), "AHEAD": config.registers is None}
    options |= {"TURNED": z.form != "act" and not config.apart}
    values = z.values if z.scale is None else z.values.view(torch.uint8)
    packed = (matrix, scales.view(torch.uint8))
    _gate_up_tiles[grid](values, z.scale, slots.ids, *packed, hidden, *experts, **options)
    return Rows(hidden, form="act" if z.form == "act" else "rounded")


def down(
    hidden: Rows,
    slots: Slots,
    w2: tuple[torch.Tensor, torch.Tensor | None],
    y: torch.Tensor,
    config: Config,
) -> torch.Tensor:
    """FC2 and the weighted sum over a token's slots, written to y [T, L]."""
    matrix, scales = w2
    (tokens, latent), width, chosen = y.shape, hidden.values.shape[1], slots.ids.shape[1]
    given = (hidden.values, slots.ids, slots.weights, matrix)
    experts = (slots.first_expert, len(matrix))
    options = _sizes(chosen, width, latent)
    if scales is None:
        options |= {"ROWS": 4, "DEPTH": min(triton.next_power_of_2(width), 1024)}
        options |= {"SLOTS": min(4, triton.next_power_of_2(chosen)), "num_warps": 8}
        down_rows[(triton.cdiv(latent, 4), tokens)](*given, y, *experts, **options)
        return y
    split = Split(width)
    at_once = min(_slots_at_once(width, chosen, config), max(MAX_WARPS // split.parts, 1))
    options |= _tile_options(split, at_once, config)
    options |= {"FORM": hidden.form, "EXACT": exactly(y), "SLOTS": at_once}
    _down_tiles[(latent // 16, tokens)](*given, scales.view(torch.uint8), y, *experts, **options)
    return y


def _sizes(chosen: int, width: int, latent: int) -> dict[str, Any]:
    return {
        "CHOSEN": chosen,
        "WIDTH": width,
        "LATENT": latent,
        "num_stages": 1,
        "launch_pdl": True,
    }


def _tile_options(split: Split, slots: int, config: Config) -> dict[str, Any]:
    options = split_options(split)
    return {**options, "num_warps": slots * split.parts, "maxnreg": config.registers}


@triton.jit
def _prefetch_share(start, COUNT: tl.constexpr, index, PROGRAMS: tl.constexpr):
    """Has PROGRAMS programs ask for the lines of COUNT elements, each its share."""
    size: tl.constexpr = COUNT * start.dtype.element_ty.primitive_bitwidth // 8
    for line in range(index, (size + LINE - 1) // LINE, PROGRAMS):
        prefetch_lines(start.to(tl.int64) + line * LINE)


@triton.jit
def _gate_up_slot(
    z, z_scale, ids, words, scales, hidden, first_expert, slot, column,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    TURNED: tl.constexpr,
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
    held = tile_words(words + tile * (PARTS * LOADS * 128) + lane, LOADS, None)
    held_scales = tile_scales(scales + tile * (PARTS * OCTETS * 128) + scale_lane, OCTETS, None)
    if EARLY:
        cuda.gdc_wait()  # z is the previous kernel's
        cuda.gdc_launch_dependents()
    elif AHEAD:
        # Over long ago, it keeps loads of weights from being moved behind products of the first.
        cuda.gdc_wait()
    token = slot // CHOSEN + tl.zeros_like(row)[:, None]
    x_scale = z_scale
    if FORM == "mxfp8":
        x_scale = z_scale + token * (LATENT // 32)
    sums = tile_sums(
        held, held_scales, z + token * LATENT, x_scale, (row >= 0)[:, None],
        1, PARTS, GROUPS, LOADS, OCTETS, LATENT, FORM, EXACT,
    )  # fmt: skip
    act: tl.constexpr = hidden.dtype.element_ty
    gate, up = tl.split(tl.reshape(sums, (8, 2)).to(act).to(tl.float32))
    activated = activate(gate, up, act, BETA, LINEAR_BETA)
    at = tl.arange(0, 8)
    if TURNED:
        at = at % 2 * 4 + at // 2  # as tile_sums reads what it rounds
    tl.store(hidden + slot * WIDTH + column * 8 + at, activated.to(act))


@triton.jit
def _gate_up_tiles(
    z,  # [T, LATENT] act, or u8: e4m3
    z_scale,  # None, or [T, LATENT / 32] u8
    ids,  # [T, CHOSEN] i64
    words,  # packed
    scales,
    hidden,  # [T * CHOSEN, WIDTH] act, or f32
    first_expert,
    experts,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADS: tl.constexpr,
    OCTETS: tl.constexpr,
    CHAINS: tl.constexpr,
):
    column = tl.program_id(0)
    token = tl.program_id(2)
    if EARLY:
        if tl.program_id(1) == 0:
            _prefetch_share(z + token * LATENT, LATENT, column, WIDTH // 8)
            if FORM == "mxfp8":
                groups: tl.constexpr = LATENT // 32
                _prefetch_share(z_scale + token * groups, groups, column, WIDTH // 8)
    else:
        cuda.gdc_wait()  # the ids are the previous kernel's
        cuda.gdc_launch_dependents()
    slots = local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    slots = without_first(slots, tl.program_id(1), CHAINS - 1)
    while slots != 0:
        _gate_up_slot(
            z, z_scale, ids, words, scales, hidden, first_expert, token * CHOSEN + first(slots),
            column, CHOSEN, WIDTH, LATENT, FORM, EXACT, BETA, LINEAR_BETA, EARLY, AHEAD, TURNED,
            PARTS, GROUPS, LOADS, OCTETS,
        )  # fmt: skip
        slots = without_first(slots, CHAINS, CHAINS)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def _down_tiles(
    hidden,  # [T * CHOSEN, WIDTH] act, or f32
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
    FORM: tl.constexpr,
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
    if column == 0:
        _prefetch_share(weights + token * CHOSEN, CHOSEN, 0, 1)
    # FC1 waits before it lets this kernel start, so that the ids are there.
    slots = local_slots(ids + token * CHOSEN, first_expert, experts, CHOSEN)
    row = tl.arange(0, SLOTS * PARTS * 32)
    word = tl.arange(0, 4)
    in_part = row % (PARTS * 32)
    lane = (in_part // 32 * (LOADS * 128) + row % 32 * 4)[:, None] + word[None, :]
    scale_lane = (in_part // 32 * (OCTETS * 128) + row % 32 * 4)[:, None] + word[None, :]
    act: tl.constexpr = y.dtype.element_ty
    total = tl.zeros((8, 2), tl.float32)
    while slots != 0:
        own = without_first(slots + 0 * row[:, None], row[:, None] // (PARTS * 32), SLOTS - 1)
        live = own != 0
        slot = token * CHOSEN + first(own)
        expert = tl.load(ids + slot, mask=live, other=first_expert) - first_expert
        tile = expert * (LATENT // 16) + column  # i64, as the ids are
        held = tile_words(words + (tile * (PARTS * LOADS * 128) + lane), LOADS, live)
        held_scales = tile_scales(
            scales + (tile * (PARTS * OCTETS * 128) + scale_lane), OCTETS, live
        )
        cuda.gdc_wait()  # hidden is the previous kernel's
        sums = tile_sums(
            held, held_scales, hidden + slot * WIDTH, None, live,
            SLOTS, PARTS, GROUPS, LOADS, OCTETS, WIDTH, FORM, EXACT,
        )  # fmt: skip
        if FORM == "act":
            sums = sums.to(act).to(tl.float32)
        index = tl.arange(0, SLOTS)
        left = without_first(slots + 0 * index, index, SLOTS - 1)
        share = tl.load(weights + token * CHOSEN + first(left), mask=left != 0, other=0.0)
        total += tl.sum(sums * share[:, None, None], 0)
        slots = without_first(slots, SLOTS, SLOTS)
    cuda.gdc_wait()
    element = column * 16 + tl.arange(0, 2)[None, :] * 8 + tl.arange(0, 8)[:, None]
    tl.store(y + token * LATENT + element, total.to(act))
