"""The state of one rank: built by one function, in layer order, before anything is captured."""

from dataclasses import dataclass

import torch

from tercel.contract import StateSpec
from tercel.core.cache import DrafterCache, KdaCache, LatentCache, ModelCache
from tercel.core.drafter import DrafterConfig
from tercel.core.group import Group
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.rank import Rank
from tercel.errors import ConfigError
from tercel.ops.spec.accept.contract import MEETINGS
from tercel.ops.spec.markov_chain.contract import POSTS

_BEFORE_CAPTURE = "cannot be created while a graph is captured; create it first"

PAGE_SCALE = 1.0
"""What a code of an FP8 cache stands for. The latents are normed and e4m3 is a floating format: at
448 it saturates, below 2 ** -6 it loses precision, and nothing between depends on the scale."""


@dataclass(frozen=True)
class CacheSizes:
    """Sinks included: page 0 and slot 0 belong to nobody."""

    num_pages: int
    page_size: int
    num_slots: int
    max_draft: int = 0


def create_cache(
    place: Rank,
    group: Group,
    *,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: str = "auto",
) -> ModelCache:
    """Zeroed caches of this rank's layers and heads; latents in `dtype`, or e4m3 with `kv_dtype`
    float8. Raises ConfigError on every rank if one
    cannot."""
    problem = _problem(sizes)
    if not group.vote(problem is None):
        raise ConfigError(problem or "another rank cannot create its caches")
    model, latent, kda = place.model, {}, {}
    for layer in place.layers:
        if model.is_mla(layer):
            latent[layer] = _latent(model, sizes, dtype, device, kv_dtype)
        else:
            kda[layer] = _kda(model, place.layout, sizes, dtype, device)
    return ModelCache(latent, kda)


def create_drafter_cache(
    config: DrafterConfig,
    layout: Layout,
    *,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: torch.device,
) -> DrafterCache:
    """Zeroed context pages of all layers of a drafter, under the page ids of the target's. Raises
    ConfigError under capture."""
    _refuse_capture("drafter cache")
    entry = config.attention.entry_shape(layout.tp)
    shape = (config.num_hidden_layers, sizes.num_pages, sizes.page_size, *entry)
    return DrafterCache(torch.zeros(shape, dtype=dtype, device=device))


CACHE = StateSpec(
    contents="paged latents per MLA layer; convolution window, recurrent state and draft records "
    "per KDA layer",
    create=create_cache,
    call_order="prefill a row from context 0 before decoding it; append latents before attending",
    wrong_order="attention reads another request's page, or the recurrence continues its state",
    shared_by=(
        "causal_conv1d",
        "kda_prefill",
        "kda_decode",
        "kda_verify",
        "kda_commit",
        "mla_append",
        "mla_query_append",
        "mla_prefill",
        "mla_decode",
    ),
)


FILTERS = 3
"""Counters per row that filters, of ops sample and accept."""
CONTEXT_COUNTERS = 256
"""More than the heads of keys and values that K3's drafters have in all layers."""


def create_counters(requests: int, drafts: int, device: torch.device) -> torch.Tensor:
    """Of ops sample and accept, for steps of at most so many requests and drafts of each. Raises
    ConfigError under capture."""
    each = max(MEETINGS, FILTERS * (1 + drafts))
    return _meeting_place("counters", requests * each, torch.int32, device)


def create_board(requests: int, drafts: int, device: torch.device) -> torch.Tensor:
    """Of op markov_chain, for steps of at most so many requests and drafts of each. Raises
    ConfigError under capture."""
    return _meeting_place("board", requests * drafts * POSTS, torch.int64, device)


def create_context_counters(device: torch.device) -> torch.Tensor:
    """Of op context_kv, which divides no head among programs where they are too few. Raises
    ConfigError under capture."""
    return _meeting_place("counters", CONTEXT_COUNTERS, torch.int32, device)


_MEETING_ORDER = {
    "call_order": "one call after the other, which each leave zeros; a graph may hold many calls",
    "wrong_order": "two calls at once wait for programs of each other, and the device stops",
}
COUNTERS = StateSpec(
    contents="zeros that count the programs of a launch which have come so far",
    create=create_counters,
    shared_by=("sample", "accept"),
    **_MEETING_ORDER,
)
BOARD = StateSpec(
    contents="zeros where the programs of a launch post their best scores and ids",
    create=create_board,
    shared_by=("markov_chain",),
    **_MEETING_ORDER,
)


def _meeting_place(name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    _refuse_capture(name)
    return torch.zeros(count, dtype=dtype, device=device)


def _refuse_capture(name: str) -> None:
    if _is_capturing():
        raise ConfigError(f"{name}: {_BEFORE_CAPTURE}")


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _problem(sizes: CacheSizes) -> str | None:
    if sizes.num_pages < 2 or sizes.num_slots < 2:
        return (
            f"cache: {sizes.num_pages} pages and {sizes.num_slots} slots leave nothing besides the "
            "sinks; raise cache_tokens or max_running"
        )
    if _is_capturing():
        return f"cache: {_BEFORE_CAPTURE}"
    return None


def _latent(
    model: ModelConfig,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: str,
) -> LatentCache:
    shape = (sizes.num_pages, sizes.page_size, model.mla_latent_dim)
    if kv_dtype == "auto":
        return LatentCache(torch.zeros(shape, dtype=dtype, device=device))
    codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return LatentCache(codes, torch.full((1,), PAGE_SCALE, device=device))


def _kda(
    model: ModelConfig,
    layout: Layout,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: torch.device,
) -> KdaCache:
    heads, dim, slots = model.kda_num_heads // layout.tp, model.kda_head_dim, sizes.num_slots
    window = model.conv_kernel_size - 1 + sizes.max_draft
    drafts = (slots, sizes.max_draft, heads)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return KdaCache(
        conv=zeros(slots, window, 3 * heads * dim, dtype=dtype),
        recurrent=zeros(slots, heads, dim, dim),
        draft_k=zeros(*drafts, dim),
        draft_v=zeros(*drafts, dim, dtype=dtype),
        draft_g=zeros(*drafts, dim),
        draft_beta=zeros(*drafts),
    )
