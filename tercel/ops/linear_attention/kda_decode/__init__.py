from tercel.ops.linear_attention.kda_decode.contract import CONTRACT
from tercel.ops.linear_attention.kda_decode.op import kda_decode

__all__ = ["CONTRACT", "kda_decode"]
