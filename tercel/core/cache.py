"""Views of the caches that a step hands to the blocks: tensors owned by the runtime.

One page-id space serves every paged layer: each owns its own tensor, all indexed by the same
block table. Page 0 and slot 0 are sinks: padded rows write there and nobody reads them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LatentCache:
    """The paged latents of one MLA layer."""

    pages: torch.Tensor
    """[pages, page_size, kv_lora_rank + qk_rope_head_dim]; normed latent, then shared key part."""


@dataclass(frozen=True)
class KdaCache:
    """The state of one KDA layer for every slot."""

    conv: torch.Tensor
    """[slots, 3P, W - 1 + max_draft] raw rows of q|k|v before the convolution, oldest first."""
    recurrent: torch.Tensor
    """[slots, H, V, K] fp32: after the first row of the latest step."""
    draft_k: torch.Tensor
    """[slots, max_draft, H, K] normalised keys of the drafts that wait for acceptance."""
    draft_v: torch.Tensor
    """[slots, max_draft, H, V]."""
    draft_g: torch.Tensor
    """[slots, max_draft, H, K] fp32 log decays."""
    draft_beta: torch.Tensor
    """[slots, max_draft, H] fp32."""


@dataclass(frozen=True)
class ModelCache:
    """Every layer's cache; a layer has an entry in exactly one of the two."""

    latent: dict[int, LatentCache]
    kda: dict[int, KdaCache]
