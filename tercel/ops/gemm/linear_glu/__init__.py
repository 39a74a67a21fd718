from tercel.ops.gemm.linear_glu.contract import CONTRACT
from tercel.ops.gemm.linear_glu.op import linear_glu

__all__ = ["CONTRACT", "linear_glu"]
