"""What the contracts of the KDA ops draw alike."""

import torch

from tercel.contract.contract import InputMaker


def draw_gate(make: InputMaker, heads: int, width: int) -> dict[str, torch.Tensor]:
    """Rates 1 .. 16 and biases that spread the decays from almost none to the bound."""
    return {
        "A_log": make.uniform(heads, low=0.0, high=2.77, dtype="f32"),
        "dt_bias": make.uniform(heads * width, low=-4.0, high=2.0, dtype="f32"),
    }
