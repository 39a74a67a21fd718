"""moe/experts_grouped as tercel/ops/_lib/kernel_grouped_experts.py says."""

from functools import partial

from tercel.ops._lib.kernel_grouped_experts import PLAIN, experts_of_act

experts_grouped = partial(experts_of_act, forms=(PLAIN,))
