from tercel.ops.attention.qk_norm_rope.contract import CONTRACT
from tercel.ops.attention.qk_norm_rope.op import qk_norm_rope

__all__ = ["CONTRACT", "qk_norm_rope"]
