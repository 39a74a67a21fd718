"""moe/route, one program per token."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_route import form, load_biases, route_token


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, scaling: float, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    _route[(tokens,)](
        logits,
        bias,
        ids,
        weights,
        experts,
        **form(experts, top_k),
        SCALING=scaling,
        RENORMALIZE=renormalize,
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
    BEST: tl.constexpr,
    SCALING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    biases = load_biases(bias, experts, PADDED)
    cuda.gdc_wait()  # the logits are the previous kernel's
    cuda.gdc_launch_dependents()
    route_token(
        logits + token * experts, biases, ids + token * TOP_K, weights + token * TOP_K, experts,
        PADDED, TOP_K, BEST, SCALING, RENORMALIZE, False,
    )  # fmt: skip
