from tercel.ops.attention.block_attention_qk_norm_rope.contract import CONTRACT
from tercel.ops.attention.block_attention_qk_norm_rope.op import block_attention_qk_norm_rope

__all__ = ["CONTRACT", "block_attention_qk_norm_rope"]
