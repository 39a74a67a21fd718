from tercel.ops.norm.add_rms_norm.contract import CONTRACT
from tercel.ops.norm.add_rms_norm.op import add_rms_norm

__all__ = ["CONTRACT", "add_rms_norm"]
