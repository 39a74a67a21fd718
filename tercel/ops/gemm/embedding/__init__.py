from tercel.ops.gemm.embedding.contract import CONTRACT
from tercel.ops.gemm.embedding.op import embedding

__all__ = ["CONTRACT", "embedding"]
