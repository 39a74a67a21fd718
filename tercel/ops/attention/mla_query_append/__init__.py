from tercel.ops.attention.mla_query_append.contract import CONTRACT
from tercel.ops.attention.mla_query_append.op import mla_query_append

__all__ = ["CONTRACT", "mla_query_append"]
