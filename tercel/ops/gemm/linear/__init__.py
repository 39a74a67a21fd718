from tercel.ops.gemm.linear.contract import CONTRACT
from tercel.ops.gemm.linear.op import linear

__all__ = ["CONTRACT", "linear"]
