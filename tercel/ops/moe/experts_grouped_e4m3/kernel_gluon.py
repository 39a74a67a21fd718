"""moe/experts_grouped_e4m3 on Hopper's warpgroup products of e4m3; what they do not serve runs as
in kernel_triton.py.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

from functools import partial

from tercel.ops._lib.kernel_slot_streams import WARPGROUPS_E4M3
from tercel.ops.moe.experts_grouped_e4m3.kernel_triton import PLAIN, run

experts_grouped_e4m3 = partial(run, forms=(WARPGROUPS_E4M3, PLAIN))
