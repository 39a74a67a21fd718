from tercel.ops.spec.accept.contract import CONTRACT
from tercel.ops.spec.accept.op import accept

__all__ = ["CONTRACT", "accept"]
