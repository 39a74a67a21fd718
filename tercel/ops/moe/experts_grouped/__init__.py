from tercel.ops.moe.experts_grouped.contract import CONTRACT
from tercel.ops.moe.experts_grouped.op import experts_grouped

__all__ = ["CONTRACT", "experts_grouped"]
