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
    page_scale: torch.Tensor | None = None
    """[1] fp32, what a code of FP8 pages stands for; None: pages hold values."""


@dataclass(frozen=True)
class KdaCache:
    """The state of one KDA layer for every slot; D is the most drafts a step may verify.

    After a step of a row with drafts the recurrent state and the first W - 1 rows of the window
    are those after the row's first token. The next verify, or kda_commit, folds the drafts that
    were accepted (a count that the host knows); until then the state lags behind by that many.
    """

    conv: torch.Tensor
    """[slots, W - 1 + D, 3P] activations: raw rows of q|k|v before the convolution, oldest first:
    the W - 1 up to and including the latest step's first token, then that step's drafts. Time
    before channels, so that a window is whole rows wherever it starts."""
    recurrent: torch.Tensor
    """[slots, H, V, K] fp32."""
    draft_k: torch.Tensor
    """[slots, D, H, K] fp32 (or activations, rounded once more): normalised keys of the drafts."""
    draft_v: torch.Tensor
    """[slots, D, H, V] activations: values after the convolution."""
    draft_g: torch.Tensor
    """[slots, D, H, K] fp32 log decays."""
    draft_beta: torch.Tensor
    """[slots, D, H] fp32."""


@dataclass(frozen=True)
class DrafterCache:
    """The paged context of a drafter, under the target's block tables and slot mappings."""

    pages: torch.Tensor
    """[layers, pages, page_size, 2, KV, D] keys, then values; of MLA [layers, pages, page_size,
    latent and turned part]."""


@dataclass(frozen=True)
class ModelCache:
    """Every layer's cache; a layer has an entry in exactly one of the two."""

    latent: dict[int, LatentCache]
    kda: dict[int, KdaCache]
