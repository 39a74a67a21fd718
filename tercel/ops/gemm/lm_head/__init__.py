from tercel.ops.gemm.lm_head.contract import CONTRACT
from tercel.ops.gemm.lm_head.op import lm_head

__all__ = ["CONTRACT", "lm_head"]
