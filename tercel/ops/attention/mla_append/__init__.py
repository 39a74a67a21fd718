from tercel.ops.attention.mla_append.contract import CONTRACT
from tercel.ops.attention.mla_append.op import mla_append

__all__ = ["CONTRACT", "mla_append"]
