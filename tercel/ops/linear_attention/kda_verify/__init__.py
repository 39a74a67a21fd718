from tercel.ops.linear_attention.kda_verify.contract import CONTRACT
from tercel.ops.linear_attention.kda_verify.op import kda_verify

__all__ = ["CONTRACT", "kda_verify"]
