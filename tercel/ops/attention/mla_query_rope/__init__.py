from tercel.ops.attention.mla_query_rope.contract import CONTRACT
from tercel.ops.attention.mla_query_rope.op import mla_query_rope

__all__ = ["CONTRACT", "mla_query_rope"]
