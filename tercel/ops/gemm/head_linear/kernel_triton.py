"""gemm/head_linear: a program computes some outputs of one head for some tokens."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

ROWS = 32
DEPTH = 64


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tokens = len(x)
    heads, outputs, depth = weight.shape
    y = x.new_empty(tokens, heads * outputs)
    if y.numel():
        width = min(max(triton.next_power_of_2(tokens), 16), 64)
        _head_linear[(triton.cdiv(tokens, width), triton.cdiv(outputs, ROWS), heads)](
            x,
            weight,
            y,
            tokens,
            outputs,
            x.stride(0),
            *weight.stride(),
            K=depth,
            ROWS=ROWS,
            TOKENS=width,
            DEPTH=DEPTH,
            num_warps=4,
            launch_pdl=True,
        )
    return y


@triton.jit(do_not_specialize=("tokens", "outputs"))
def _head_linear(
    x,  # [tokens, heads * K] act, rows x_stride apart
    weight,  # [heads, outputs, K] act, strided
    y,  # [tokens, heads * outputs] act
    tokens,
    outputs,
    x_stride,
    head_stride,
    row_stride,
    k_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, DEPTH)
    real, inside = (token < tokens)[None, :], (row < outputs)[:, None]
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    w = weight + head * head_stride + row[:, None] * row_stride + k[None, :] * k_stride
    xs = x + token[None, :].to(tl.int64) * x_stride + head * K + k[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, K, DEPTH):
        left = tl.load(w + start * k_stride, mask=inside & (k < K - start)[None, :], other=0.0)
        right = tl.load(xs + start, mask=real & (k < K - start)[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    there = (token[None, :].to(tl.int64) * tl.num_programs(2) + head) * outputs + row[:, None]
    tl.store(y + there, sums.to(y.dtype.element_ty), mask=inside & real)
