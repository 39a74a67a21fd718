"""moe/experts_grouped_e4m3 on Hopper's warpgroup products of e4m3; what they do not serve runs as
in kernel_triton.py.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

from functools import partial

from tercel.ops._lib.kernel_grouped_experts import Form
from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3
from tercel.ops._lib.kernel_slot_wgmma import choose, product, serves
from tercel.ops.moe.experts_grouped_e4m3.kernel_triton import PLAIN, run

WARPGROUPS = Form(
    partial(choose, stages=4),
    product,
    lambda x, slots, _: rows_in_e4m3(x, slots, four=True),
    partial(serves, e4m3=True),
)

experts_grouped_e4m3 = partial(run, forms=(WARPGROUPS, PLAIN))
