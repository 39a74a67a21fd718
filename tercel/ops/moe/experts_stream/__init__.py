from tercel.ops.moe.experts_stream.contract import CONTRACT
from tercel.ops.moe.experts_stream.op import experts_stream

__all__ = ["CONTRACT", "experts_stream"]
