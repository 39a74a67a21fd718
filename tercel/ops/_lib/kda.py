"""What the contracts of the KDA ops draw alike."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tercel.contract.contract import Cell, InputMaker
from tercel.errors import ContractError
from tercel.ops._lib.pools import check_slots, draw_pool

HEAD = {"K": 128, "V": 128, "W": 4}
"""Sizes of a head of every published model, and the taps before it."""
SMALL_HEAD = {"K": 16, "V": 32, "W": 4}


class Tiles(NamedTuple):
    """How a kernel's program passes over the state of its head."""

    tile: int
    """Value channels at a time."""
    parts: int
    """Parts of the keys that one thread holds."""
    warps: int
    prefetch: bool = False
    """Ask for a slot before the wait: while all programs run at once, there is time for it."""


def choose_tiles(table: tuple[tuple[int, Tiles], ...], programs: int, v_dim: int) -> Tiles:
    """The first row of (most programs, tiles) that holds a call of `programs`, rows times heads."""
    tiles = next(tiles for most, tiles in table if programs <= most)
    return tiles._replace(tile=min(tiles.tile, v_dim))


def kernel_numbers(
    rows: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    pools: tuple[torch.Tensor, ...],
    lower_bound: float | None,
    eps: float,
) -> tuple[float, ...]:
    """What the kernels of a whole layer take behind their tensors: the strides of rows, taps and
    windows, the bound, the eps of the norm, and the number of heads."""
    strides = (*(x.stride(0) for x in rows), *weights[0].stride(), pools[0].stride(0))
    return (*strides, 0.0 if lower_bound is None else lower_bound, eps, pools[1].shape[1])


def kernel_options(
    weights: tuple[torch.Tensor, ...],
    pools: tuple[torch.Tensor, ...],
    lower_bound: float | None,
    tiles: Tiles,
) -> dict[str, Any]:
    """What those kernels are built for."""
    _, _, v_dim, k_dim = pools[1].shape
    return {
        "K": k_dim,
        "V": v_dim,
        "W": weights[0].shape[1],
        "BOUNDED": lower_bound is not None,
        "TILE": tiles.tile,
        "PARTS": tiles.parts,
        "num_warps": tiles.warps,
    }


def kernel_limits(sizes: Mapping[str, int]) -> str | None:
    """Why the kernels do not serve these sizes of a head; None where they do."""
    for axis in "KV":
        if sizes[axis] < 16 or sizes[axis] & (sizes[axis] - 1):
            return f"{axis} is {sizes[axis]}, needs a power of two from 16"
    if sizes.get("W", 2) < 2:
        return f"W is {sizes['W']}, needs at least 2 taps"
    return None


def draw_gate(make: InputMaker, heads: int, width: int) -> dict[str, torch.Tensor]:
    """Rates 1 .. 16 and biases that spread the decays from almost none to the bound."""
    return {
        "A_log": make.uniform(heads, low=0.0, high=2.77, dtype="f32"),
        "dt_bias": make.uniform(heads * width, low=-4.0, high=2.0, dtype="f32"),
    }


def draw_layer(cell: Cell, make: InputMaker, tokens: int) -> dict[str, torch.Tensor]:
    """A layer's projections of `tokens` and its weights; every third row of q|k|v is so short that
    the eps of its normalisation counts."""
    heads, k_dim, v_dim = cell["H"], cell["K"], cell["V"]
    qkv = make.normal(tokens, heads * (2 * k_dim + v_dim))
    qkv[::3] *= 1e-3
    return {
        "qkv": qkv,
        "gate": make.normal(tokens, heads * v_dim),
        "f": make.normal(tokens, heads * k_dim, scale=2.0),
        "b": make.normal(tokens, heads, scale=2.0),
        "conv_weight": make.normal(qkv.shape[1], cell["W"], dtype="f32"),
        **draw_gate(make, heads, k_dim),
        "o_norm": make.uniform(v_dim, low=0.5, high=1.5, dtype="f32"),
    }


def draw_state(
    cell: Cell, make: InputMaker, slots: torch.Tensor, *, window: int, known: int
) -> dict[str, torch.Tensor]:
    """Pools whose `slots` hold a state and `known` rows of a window; poison elsewhere."""
    heads, k_dim, v_dim, rows = cell["H"], cell["K"], cell["V"], slots.shape[0]
    windows = make.poison(rows, window, heads * (2 * k_dim + v_dim))
    windows[:, :known] = make.normal(rows, known, windows.shape[2])
    states = make.normal(rows, heads, v_dim, k_dim, scale=0.3, dtype="f32")
    return {
        "conv": draw_pool(make, cell["SLOTS"], slots, windows, "act"),
        "recurrent": draw_pool(make, cell["SLOTS"], slots, states, "f32"),
    }


def draw_pending(make: InputMaker, rows: int, most: int) -> torch.Tensor:
    """[rows] accepted drafts, 0 .. most; the first row has all of them."""
    pending = make.integers(rows, low=0, high=most + 1)
    pending[0] = most
    return pending


def draw_records(
    cell: Cell, make: InputMaker, slots: torch.Tensor, pending: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Records of each slot's pending drafts, poison behind them and in other slots."""
    rows, drafts, heads, k_dim, v_dim = (cell[axis] for axis in ("R", "D", "H", "K", "V"))
    k = make.normal(rows, drafts, heads, k_dim, dtype="f32")
    records = {
        "draft_k": k / k.norm(dim=-1, keepdim=True),
        "draft_v": make.normal(rows, drafts, heads, v_dim),
        "draft_g": make.uniform(rows, drafts, heads, k_dim, low=-5.0, high=0.0, dtype="f32"),
        "draft_beta": make.uniform(rows, drafts, heads, low=0.0, high=1.0, dtype="f32"),
    }
    unknown = torch.arange(drafts, device=pending.device) >= pending.unsqueeze(1)
    for record in records.values():
        record.masked_fill_(unknown.view(rows, drafts, *[1] * (record.dim() - 2)), torch.nan)
    return {
        name: draw_pool(make, cell["SLOTS"], slots, record, "act" if name == "draft_v" else "f32")
        for name, record in records.items()
    }


def check_drafts(
    *,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    **_: Any,
) -> None:
    """Raises ContractError for slots or accepted drafts that the pools do not have."""
    check_slots(slots, recurrent.shape[0])
    drafts, accepted = draft_k.shape[1], pending.tolist()
    if not all(0 <= count <= drafts for count in accepted):
        raise ContractError(f"pending: {accepted} is not within 0 .. {drafts}")
