from tercel.ops.gemm.linear_f32.contract import CONTRACT
from tercel.ops.gemm.linear_f32.op import linear_f32

__all__ = ["CONTRACT", "linear_f32"]
