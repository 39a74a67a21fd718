from tercel.ops.sampling.penalize.contract import CONTRACT
from tercel.ops.sampling.penalize.op import penalize

__all__ = ["CONTRACT", "penalize"]
