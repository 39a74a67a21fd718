from tercel.ops.sampling.logprobs.contract import CONTRACT
from tercel.ops.sampling.logprobs.op import logprobs

__all__ = ["CONTRACT", "logprobs"]
