from tercel.ops.norm.embed_rms_norm.contract import CONTRACT
from tercel.ops.norm.embed_rms_norm.op import embed_rms_norm

__all__ = ["CONTRACT", "embed_rms_norm"]
