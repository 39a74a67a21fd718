from tercel.ops.linear_attention.kda_prefill.contract import CONTRACT
from tercel.ops.linear_attention.kda_prefill.op import kda_prefill

__all__ = ["CONTRACT", "kda_prefill"]
