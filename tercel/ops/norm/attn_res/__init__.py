from tercel.ops.norm.attn_res.contract import CONTRACT
from tercel.ops.norm.attn_res.op import attn_res

__all__ = ["CONTRACT", "attn_res"]
