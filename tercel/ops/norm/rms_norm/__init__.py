from tercel.ops.norm.rms_norm.contract import CONTRACT
from tercel.ops.norm.rms_norm.op import rms_norm

__all__ = ["CONTRACT", "rms_norm"]
