from tercel.ops.attention.mla_decode.contract import CONTRACT
from tercel.ops.attention.mla_decode.op import mla_decode

__all__ = ["CONTRACT", "mla_decode"]
