from tercel.ops.moe.route_quantize.contract import CONTRACT
from tercel.ops.moe.route_quantize.op import route_quantize

__all__ = ["CONTRACT", "route_quantize"]
