"""attention/qk_norm_rope: one program for up to 16 heads of a token."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_rotary import norm_rotate

HEADS = 16


def qk_norm_rope(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, dim, turned = len(qkv), len(q_norm), heads + kv_heads
    out = qkv.new_empty(tokens, turned, dim)
    rows = min(triton.next_power_of_2(turned), HEADS)
    _norm_rotate_heads[(tokens, triton.cdiv(turned, rows))](
        qkv,
        q_norm,
        k_norm,
        inv_freq,
        positions,
        out,
        heads,
        turned,
        qkv.stride(0),
        eps,
        rope_scale,
        ROWS=rows,
        D=dim,
        INTERLEAVED=interleaved,
        num_warps=max(1, min(4, rows * dim // 256)),
        launch_pdl=True,
    )
    return out[:, :heads], out[:, heads:]


@triton.jit(do_not_specialize=["heads", "turned"])
def _norm_rotate_heads(
    qkv,  # [T, (turned + KV) * D] act, rows qkv_stride apart
    q_norm,  # [D] act
    k_norm,  # [D] act
    inv_freq,  # [D / 2] f32
    positions,  # [T] i64
    out,  # [T, turned, D] act
    heads,
    turned,
    qkv_stride,
    eps,
    rope_scale,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    cuda.gdc_launch_dependents()
    of_q = tl.load(q_norm + d)[None, :]
    of_k = tl.load(k_norm + d)[None, :]
    norm = tl.where((head < heads)[:, None], of_q, of_k)
    frequency = tl.load(inv_freq + tl.arange(0, D // 2))
    cuda.gdc_wait()
    position = tl.load(positions + token) + tl.zeros((ROWS,), tl.int64)
    real = (head < turned)[:, None]
    here = head[:, None] * D + d[None, :]
    x = tl.load(qkv + token * qkv_stride + here, mask=real, other=0.0)
    y = norm_rotate(x, norm, frequency, position, eps, rope_scale, ROWS, D, INTERLEAVED)
    tl.store(out + token * turned * D + here, y.to(x.dtype), mask=real)
