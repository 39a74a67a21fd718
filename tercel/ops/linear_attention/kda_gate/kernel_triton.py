"""linear_attention/kda_gate over blocks of tokens times a head's channels."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_kda import log_decay

TOKENS = 16
"""Tokens per program."""


def kda_gate(
    f: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    tokens, heads = f.shape[0], A_log.shape[0]
    width = f.shape[1] // heads
    g = torch.empty(tokens, heads, width, dtype=torch.float32, device=f.device)
    if tokens == 0:
        return g
    block = min(TOKENS, triton.next_power_of_2(tokens))
    _gate[(heads, triton.cdiv(tokens, block))](
        f,
        A_log,
        dt_bias,
        g,
        tokens,
        f.stride(0),
        0.0 if lower_bound is None else lower_bound,
        heads,
        K=width,
        CHANNELS=triton.next_power_of_2(width),
        TOKENS=block,
        BOUNDED=lower_bound is not None,
        num_warps=4,
        launch_pdl=True,
    )
    return g


@triton.jit
def _gate(
    f,  # [tokens, H * K] act, rows f_stride apart
    A_log,  # [H]
    dt_bias,  # [H * K]
    g,  # [tokens, H, K]
    tokens,
    f_stride,
    lower_bound,
    H,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, CHANNELS)
    inside = (token < tokens)[:, None] & (channel < K)[None, :]
    channel += head * K
    cuda.gdc_launch_dependents()
    bias = tl.load(dt_bias + channel, mask=channel < H * K, other=0.0)
    rate = tl.exp(tl.load(A_log + head))
    cuda.gdc_wait()
    raw = tl.load(f + token[:, None] * f_stride + channel[None, :], mask=inside, other=0.0)
    decays = log_decay(raw, rate, bias[None, :], lower_bound, BOUNDED)
    tl.store(g + token[:, None] * (H * K) + channel[None, :], decays, mask=inside)
