from tercel.ops.attention.block_attention.contract import CONTRACT
from tercel.ops.attention.block_attention.op import block_attention

__all__ = ["CONTRACT", "block_attention"]
