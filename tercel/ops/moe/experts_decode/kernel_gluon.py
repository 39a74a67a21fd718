"""moe/experts_decode with MXFP4 of many tokens on Hopper's warpgroup products, which read an expert
once for all of its slots; everything else runs as in kernel_triton.py.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

from functools import partial

import torch

from tercel.ops._lib.kernel_slot_products import Experts
from tercel.ops._lib.kernel_slot_streams import WARPGROUPS
from tercel.ops.moe.experts_decode.kernel_triton import SHARED, run

MANY = 33
"""Tokens. Chosen by measurement (benchmarks/experts_crossover.py): at 32 both ways take as long."""


def _are_many(z: torch.Tensor, experts: Experts) -> bool:
    return len(z) >= MANY and WARPGROUPS.serves(z, experts)


experts_decode = partial(run, forms=(SHARED, WARPGROUPS._replace(serves=_are_many)))
