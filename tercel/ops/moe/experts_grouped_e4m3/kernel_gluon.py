"""moe/experts_grouped_e4m3 on Hopper's warpgroup products of e4m3; what they do not serve runs as
in kernel_triton.py.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

from functools import partial

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_slot_products import Experts, Matrix
from tercel.ops._lib.kernel_slot_products import product as plain_product
from tercel.ops._lib.kernel_slot_wgmma import Block, product, serves
from tercel.ops._lib.kernel_slots import in_chunks
from tercel.ops.moe.experts_grouped_e4m3 import kernel_triton
from tercel.ops.moe.experts_grouped_e4m3.kernel_triton import launch

BLOCKS: tuple[tuple[int, Block], ...] = (
    (48, Block((32,), 4, stages=4)),
    (96, Block((64,), 4, stages=4)),
    (1 << 30, Block((64, 32), 4, stages=4)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides;
benchmarks/experts_prefill.py measures them."""


def choose(slots_per_expert: float) -> Block:
    return next(block for most, block in BLOCKS if slots_per_expert <= most)


def experts_grouped_e4m3(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    up, down = Matrix(w13, w13_scale, w13_largest), Matrix(w2, w2_scale, w2_largest)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    if z.dtype == torch.bfloat16 and serves(experts, e4m3=True):
        run = partial(launch, choose=choose, product=product, four=True)
    else:
        run = partial(launch, choose=kernel_triton.choose, product=plain_product, four=False)
    return in_chunks(partial(run, experts=experts), z, ids, weights)
