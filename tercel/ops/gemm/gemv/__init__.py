from tercel.ops.gemm.gemv.contract import CONTRACT
from tercel.ops.gemm.gemv.op import gemv

__all__ = ["CONTRACT", "gemv"]
