from tercel.ops.moe.experts_decode_mxfp8.contract import CONTRACT
from tercel.ops.moe.experts_decode_mxfp8.op import experts_decode_mxfp8

__all__ = ["CONTRACT", "experts_decode_mxfp8"]
