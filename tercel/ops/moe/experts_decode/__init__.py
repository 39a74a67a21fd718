from tercel.ops.moe.experts_decode.contract import CONTRACT
from tercel.ops.moe.experts_decode.op import experts_decode

__all__ = ["CONTRACT", "experts_decode"]
