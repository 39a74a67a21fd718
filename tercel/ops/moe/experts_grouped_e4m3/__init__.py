from tercel.ops.moe.experts_grouped_e4m3.contract import CONTRACT
from tercel.ops.moe.experts_grouped_e4m3.op import experts_grouped_e4m3

__all__ = ["CONTRACT", "experts_grouped_e4m3"]
