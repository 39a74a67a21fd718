"""moe/experts_grouped with MXFP4 and bf16 on Hopper's warpgroup products; what they do not serve
runs as in kernel_triton.py.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

from functools import partial

from tercel.ops._lib.kernel_grouped_experts import PLAIN, experts_of_act
from tercel.ops._lib.kernel_slot_streams import WARPGROUPS

experts_grouped = partial(experts_of_act, forms=(WARPGROUPS, PLAIN))
