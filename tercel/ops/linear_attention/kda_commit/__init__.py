from tercel.ops.linear_attention.kda_commit.contract import CONTRACT
from tercel.ops.linear_attention.kda_commit.op import kda_commit

__all__ = ["CONTRACT", "kda_commit"]
