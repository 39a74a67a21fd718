"""Gathers the chosen experts and runs all slots of all tokens at once, in fp32."""

import torch

from tercel.core import mxfp4, mxfp8
from tercel.ops._lib.activation import activate
from tercel.ops._lib.experts import combine, local_experts


def experts_decode_mxfp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    ids_early: bool = False,
) -> torch.Tensor:
    (tokens, slots), (experts, latent) = ids.shape, w2.shape[:2]
    index, shares = local_experts(ids, weights, first_expert, experts)
    flat = index.view(-1)
    z = mxfp8.dequantize(codes, scale, torch.float32)
    chosen = mxfp4.dequantize(w13[flat], w13_scale[flat], torch.float32)
    hidden = torch.bmm(chosen, z.repeat_interleave(slots, 0)[:, :, None]).mT
    activated = mxfp8.rounded(activate(hidden, activation, beta, linear_beta))
    chosen = mxfp4.dequantize(w2[flat], w2_scale[flat], torch.float32)
    outputs = torch.bmm(chosen, activated.mT).view(tokens, slots, latent)
    return combine(outputs, shares).to(torch.bfloat16)
