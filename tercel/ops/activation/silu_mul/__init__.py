from tercel.ops.activation.silu_mul.contract import CONTRACT
from tercel.ops.activation.silu_mul.op import silu_mul

__all__ = ["CONTRACT", "silu_mul"]
