from tercel.ops.spec.context_kv.contract import CONTRACT
from tercel.ops.spec.context_kv.op import context_kv

__all__ = ["CONTRACT", "context_kv"]
