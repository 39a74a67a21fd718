from tercel.ops.sampling.sample.contract import CONTRACT
from tercel.ops.sampling.sample.op import sample

__all__ = ["CONTRACT", "sample"]
