"""What the contracts of the KDA ops draw alike."""

import torch

from tercel.contract.contract import Cell, InputMaker
from tercel.ops._lib.pools import draw_pool


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
    cell: Cell, make: InputMaker, slots: torch.Tensor, window_rows: int
) -> dict[str, torch.Tensor]:
    """Pools whose `slots` hold a state and the first `window_rows` of a window, poison elsewhere."""
    heads, k_dim, v_dim, rows = cell["H"], cell["K"], cell["V"], slots.shape[0]
    windows = make.poison(rows, cell["S"], heads * (2 * k_dim + v_dim))
    windows[:, :window_rows] = make.normal(rows, window_rows, windows.shape[2])
    states = make.normal(rows, heads, v_dim, k_dim, scale=0.3, dtype="f32")
    return {
        "conv": draw_pool(make, cell["SLOTS"], slots, windows, "act"),
        "recurrent": draw_pool(make, cell["SLOTS"], slots, states, "f32"),
    }
