"""Norms in few torch calls: on a CPU a small row costs its calls, and a call that takes a Python
scalar costs two. torch.rms_norm is made of such calls there and takes twice the time. Rounding
points are those of the references."""

import torch

from tercel.ops._lib.dtypes import wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """act(act(x / rms(x)) * weight) over the last axis."""
    row = wide(x)
    total = (row * row).sum(-1, keepdim=True)
    scale = torch.add(total.new_full((), eps), total, alpha=1.0 / x.shape[-1]).rsqrt_()
    return (row * scale).to(x.dtype).mul_(weight)


def attn_res(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The softmax mixture of the rows bank [S, T, N] and prefix [T, N]; one rounding."""
    tokens, width = prefix.shape
    flat = wide(torch.cat((bank.flatten(0, 1), prefix)))
    total = (flat * flat).sum(-1)
    scale = torch.add(total.new_full((), eps), total, alpha=1.0 / width).rsqrt_()
    scores = torch.mv(flat, wide(res_norm) * wide(res_proj)).mul_(scale)
    if tokens == 1:
        mixture = torch.mm(torch.softmax(scores, 0).unsqueeze(0), flat)
    else:
        shares = torch.softmax(scores.view(-1, tokens), 0).unsqueeze(-1)
        mixture = flat.view(-1, tokens, width).mul_(shares).sum(0)
    return mixture.to(prefix.dtype)
