"""moe/route_quantize: one program routes a token, others quantize pieces of its latent."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_mxfp8 import (
    e4m3_code,
    exponent_byte,
    inverse,
    magnitude,
    rounded_to_e4m3,
)
from tercel.ops._lib.kernel_route import form, load_biases, route_token

BLOCKS = 32
"""Of 32 values, per program."""


def route_quantize(
    logits: torch.Tensor, bias: torch.Tensor, z: torch.Tensor, *, top_k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    latent = z.shape[1]
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=z.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=z.device)
    codes = torch.empty(tokens, latent, dtype=torch.float8_e4m3fn, device=z.device)
    scale = torch.empty(tokens, latent // 32, dtype=torch.uint8, device=z.device)
    pieces = triton.cdiv(latent, 32 * BLOCKS)
    options = form(experts, top_k)
    options["num_warps"] = max(options["num_warps"], 4)
    _route_quantize[(1 + pieces, tokens)](
        logits.detach(),
        bias.detach(),
        z.detach(),
        ids,
        weights,
        codes.view(torch.uint8),
        scale,
        experts,
        LATENT=latent,
        BLOCKS=BLOCKS,
        **options,
        SCALING=scaling,
        launch_pdl=True,
    )
    return ids, weights, codes, scale


@triton.jit
def _route_quantize(
    logits,  # [T, experts] f32
    bias,  # [experts] f32
    z,  # [T, LATENT] act
    ids,  # [T, TOP_K] i64
    weights,  # [T, TOP_K] f32
    codes,  # [T, LATENT] u8, e4m3
    scale,  # [T, LATENT / 32] u8
    experts,
    LATENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    BEST: tl.constexpr,
    SCALING: tl.constexpr,
):
    piece = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    if piece == 0:
        biases = load_biases(bias, experts, PADDED)
        cuda.gdc_wait()  # logits and z are earlier kernels'
        cuda.gdc_launch_dependents()
        route_token(
            logits + token * experts, biases, ids + token * TOP_K, weights + token * TOP_K, experts,
            PADDED, TOP_K, BEST, SCALING, True, True,
        )  # fmt: skip
    else:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
        block = (piece - 1) * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < LATENT // 32
        at = token * LATENT + block[:, None] * 32 + tl.arange(0, 32)[None, :]
        values = tl.load(z + at, mask=inside[:, None], other=0.0).to(tl.float32)
        largest = tl.max(magnitude(values), 1)
        byte = exponent_byte(largest)
        scaled = rounded_to_e4m3(values * inverse(largest, byte)[:, None])
        tl.store(codes + at, e4m3_code(scaled).to(tl.uint8), mask=inside[:, None])
        tl.store(scale + token * (LATENT // 32) + block, byte.to(tl.uint8), mask=inside)
