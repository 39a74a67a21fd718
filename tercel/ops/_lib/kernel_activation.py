"""Gated activations in kernels: fp32 values in, the fp32 product out."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

BLOCK = 1024


class Activation(NamedTuple):
    name: str
    """situ or silu."""
    beta: float | None
    linear_beta: float | None


def activation_options(activation: Activation | None) -> dict[str, Any]:
    """What `activate` needs to know; None: nothing is activated."""
    if activation is None or activation.name == "silu":
        return {"BETA": 0.0, "LINEAR_BETA": 0.0}
    return {"BETA": activation.beta, "LINEAR_BETA": activation.linear_beta or 0.0}


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Numerator and denominator, which is at least 1 and at most 2: of a continued fraction up to
    1, where the other form loses digits."""
    y = tl.minimum(x * x, 1.0)
    top = x * (1.0 + y * (17325 / 135135 + y * (378 / 135135 + y * (1 / 135135))))
    bottom = 1.0 + y * (62370 / 135135 + y * (3150 / 135135 + y * (28 / 135135)))
    small = tl.exp(-2 * tl.abs(x))
    near = x * x < 1.0
    above = tl.where(x < 0, small - 1, 1 - small)
    return tl.where(near, top, above), tl.where(near, bottom, 1 + small)


@triton.jit
def activate(gate, up, act: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """SiTU with the bounds BETA and LINEAR_BETA, 0: unbounded; with BETA 0 SiLU, whose gate is
    rounded to `act` before the product."""
    if BETA == 0.0:
        return (gate * sigmoid(gate)).to(act).to(tl.float32) * up
    else:
        # One division for all three factors.
        top, bottom = tanh(gate * (1.0 / BETA))
        top *= BETA
        if LINEAR_BETA == 0.0:
            top *= up
        else:
            more, below = tanh(up * (1.0 / LINEAR_BETA))
            top *= LINEAR_BETA * more
            bottom *= below
        return top / (bottom * (1 + tl.exp(-gate)))


def gated_product(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """One launch over gate_up [T, 2 * I]; the bounds as `activate` takes them."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(tokens, width)
    if y.numel():
        _gated_product[(tokens, triton.cdiv(width, BLOCK))](
            gate_up,
            y,
            width,
            gate_up.stride(0),
            BETA=beta,
            LINEAR_BETA=linear_beta,
            BLOCK=BLOCK,
            num_warps=4,
            launch_pdl=True,
        )
    return y


@triton.jit
def _gated_product(
    gate_up,  # [T, 2 * width] act, rows stride apart
    y,  # [T, width] act
    width,
    stride,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_wait()
    # After the wait: experts that follow may read older ids before theirs (moe in blocks/mlp.py).
    cuda.gdc_launch_dependents()
    here = gate_up + token * stride + at
    gate = tl.load(here, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=at < width, other=0.0).to(tl.float32)
    act: tl.constexpr = y.dtype.element_ty
    product = activate(gate, up, act, BETA, LINEAR_BETA)
    tl.store(y + token * width + at, product.to(act), mask=at < width)
