from tercel.ops.spec.context_latent.contract import CONTRACT
from tercel.ops.spec.context_latent.op import context_latent

__all__ = ["CONTRACT", "context_latent"]
