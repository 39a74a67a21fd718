from tercel.ops.gemm.head_linear.contract import CONTRACT
from tercel.ops.gemm.head_linear.op import head_linear

__all__ = ["CONTRACT", "head_linear"]
