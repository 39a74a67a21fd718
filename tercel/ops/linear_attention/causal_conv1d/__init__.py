from tercel.ops.linear_attention.causal_conv1d.contract import CONTRACT
from tercel.ops.linear_attention.causal_conv1d.op import causal_conv1d

__all__ = ["CONTRACT", "causal_conv1d"]
