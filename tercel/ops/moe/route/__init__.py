from tercel.ops.moe.route.contract import CONTRACT
from tercel.ops.moe.route.op import route

__all__ = ["CONTRACT", "route"]
