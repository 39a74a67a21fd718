from tercel.ops.linear_attention.kda_gate.contract import CONTRACT
from tercel.ops.linear_attention.kda_gate.op import kda_gate

__all__ = ["CONTRACT", "kda_gate"]
