"""norm/gated_rms_norm, a few heads of one token per program."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HEADS = 8
"""Per program: 1024 values of K3's heads, 8 a thread."""


def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    tokens, heads, channels = o.shape
    y = o.new_empty(tokens, heads * channels)
    if tokens:
        _gated_rms_norm[(tokens, triton.cdiv(heads, HEADS))](
            o,
            gate,
            weight,
            y,
            heads,
            gate.stride(0),
            eps,
            V=channels,
            WIDTH=triton.next_power_of_2(channels),
            HEADS=HEADS,
            num_warps=4,
            launch_pdl=True,
        )
    return y


@triton.jit
def _gated_rms_norm(
    o,  # [T, heads, V] act
    gate,  # [T, heads * V] act, rows gate_stride apart
    weight,  # [V] fp32
    y,  # [T, heads * V] act
    heads,
    gate_stride,
    eps,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    v = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (v < V)[None, :]
    at = head[:, None] * V + v[None, :]
    cuda.gdc_launch_dependents()
    gain = tl.load(weight + v, mask=v < V, other=0.0)
    cuda.gdc_wait()  # o and gate are the previous kernels'
    value = tl.load(o + token * heads * V + at, mask=inside, other=0.0).to(tl.float32)
    pre = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / V + eps)
    result = value * scale[:, None] * gain[None, :] * (1 / (1 + tl.exp(-pre)))
    tl.store(y + token * heads * V + at, result.to(y.dtype.element_ty), mask=inside)
