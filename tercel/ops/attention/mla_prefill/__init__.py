from tercel.ops.attention.mla_prefill.contract import CONTRACT
from tercel.ops.attention.mla_prefill.op import mla_prefill

__all__ = ["CONTRACT", "mla_prefill"]
