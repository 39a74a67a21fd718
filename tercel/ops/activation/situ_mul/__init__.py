from tercel.ops.activation.situ_mul.contract import CONTRACT
from tercel.ops.activation.situ_mul.op import situ_mul

__all__ = ["CONTRACT", "situ_mul"]
