from tercel.ops.norm.attn_res_rms_norm.contract import CONTRACT
from tercel.ops.norm.attn_res_rms_norm.op import attn_res_rms_norm

__all__ = ["CONTRACT", "attn_res_rms_norm"]
