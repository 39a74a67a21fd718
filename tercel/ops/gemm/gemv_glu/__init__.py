from tercel.ops.gemm.gemv_glu.contract import CONTRACT
from tercel.ops.gemm.gemv_glu.op import gemv_glu

__all__ = ["CONTRACT", "gemv_glu"]
