"""moe/route, one program per token."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_route import route_token


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, scaling: float, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    padded = max(triton.next_power_of_2(experts), 32)
    _route[(tokens,)](
        logits,
        bias,
        ids,
        weights,
        experts,
        PADDED=padded,
        TOP_K=top_k,
        TOP_K_PADDED=triton.next_power_of_2(top_k),
        SCALING=scaling,
        RENORMALIZE=renormalize,
        num_warps=min(padded // 32, 4),
        launch_pdl=True,
    )
    return ids, weights


@triton.jit
def _route(
    logits,  # [T, experts] f32
    bias,  # [experts] f32
    ids,  # [T, TOP_K] i64
    weights,  # [T, TOP_K] f32
    experts,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    SCALING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cuda.gdc_wait()  # the logits are the previous kernel's
    cuda.gdc_launch_dependents()
    route_token(
        logits + token * experts, bias, ids + token * TOP_K, weights + token * TOP_K, experts,
        PADDED, TOP_K, TOP_K_PADDED, SCALING, RENORMALIZE, False,
    )  # fmt: skip
