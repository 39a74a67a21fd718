from tercel.ops.norm.gated_rms_norm.contract import CONTRACT
from tercel.ops.norm.gated_rms_norm.op import gated_rms_norm

__all__ = ["CONTRACT", "gated_rms_norm"]
