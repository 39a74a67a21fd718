"""spec/context_latent: the product for all layers, then a program per token and layer that norms,
turns and stores.

The product streams the weight where tokens are few, as gemm/gemv; for more it is torch's.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_gemv import product
from tercel.ops._lib.kernel_latent import rms_norm
from tercel.ops._lib.kernel_rotary import turn, turns

FEW_TOKENS = 64


def context_latent(
    x: torch.Tensor,
    weight: torch.Tensor,
    kv_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> None:
    layers, count, size, entry = pages.shape
    tokens, rank = len(x), kv_norm.shape[1]
    if tokens <= FEW_TOKENS:
        rows = product(x, weight, streams=x.device.type != "cpu")
    else:
        rows = torch.nn.functional.linear(x, weight)
    _store_entry[(layers, tokens)](
        rows,
        kv_norm,
        inv_freq,
        positions,
        pages,
        slot_mapping,
        count * size,
        eps,
        rope_scale,
        L=rank,
        D=entry - rank,
        INTERLEAVED=interleaved,
        num_warps=1,
        launch_pdl=True,
    )


@triton.jit(do_not_specialize=["slots"])
def _store_entry(
    rows,  # [tokens, layers, L + D] act
    kv_norm,  # [layers, L] act
    inv_freq,  # [D / 2] f32
    positions,  # [tokens] i64
    pages,  # [layers, slots, L + D] act
    slot_mapping,  # [tokens] i64
    slots,
    eps,
    rope_scale,
    L: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, triton.next_power_of_2(L))
    d = tl.arange(0, D)
    cuda.gdc_launch_dependents()
    norm = tl.load(kv_norm + layer * L + lanes, mask=lanes < L, other=0.0)
    frequency = tl.load(inv_freq + tl.arange(0, D // 2))
    cuda.gdc_wait()
    position = tl.load(positions + token + tl.arange(0, 1))
    slot = tl.load(slot_mapping + token)
    row = rows + (token * tl.num_programs(0) + layer) * (L + D)
    latent = tl.load(row + lanes, mask=lanes < L, other=0.0)
    key = tl.load(row + L + d)[None, :].to(tl.float32)
    normed = rms_norm(latent[None, :], norm[None, :], eps, L)
    cos, sin = turns(frequency, position, rope_scale)
    turned = turn(key, cos, sin, 1, D, INTERLEAVED)
    here = pages + (layer * slots + slot) * (L + D)
    tl.store(here + lanes[None, :], normed, mask=(lanes < L)[None, :])
    tl.store(here + L + d[None, :], turned.to(latent.dtype))
