from tercel.ops.spec.markov_chain.contract import CONTRACT
from tercel.ops.spec.markov_chain.op import markov_chain

__all__ = ["CONTRACT", "markov_chain"]
