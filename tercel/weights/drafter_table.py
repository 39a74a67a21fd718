"""The weights of a drafter as data: every field of DrafterWeights and where it is stored.

Checkpoints spell some tensors in more than one way, with or without `model.` in front. A table is
made for the names that there are; for a checkpoint that has yet to be written, the first spelling
of each is taken.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tercel.core.drafter import DrafterConfig, GqaShape, MlaShape
from tercel.core.drafter_parameters import (
    ConfidenceWeights,
    ContextWeights,
    DrafterLayerWeights,
    DrafterWeights,
    GqaWeights,
    MarkovWeights,
)
from tercel.core.layout import Axis, Layout
from tercel.core.parameters import MlaWeights, MlpWeights
from tercel.errors import ConfigError
from tercel.weights.rows import Node, Row, Source
from tercel.weights.transforms import View, as_row, as_stored, key_half, rows, value_half

HEADS, WIDTH, VOCAB, TAPS = Axis.HEADS, Axis.WIDTH, Axis.VOCAB, Axis.TAPS

_PREFIXES = ("", "model.")
_SHARED = ("lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors, which are not loaded."""
_EMBED = "embed_tokens.weight"


@dataclass(frozen=True)
class Names:
    """The tensors of a checkpoint, by any of their spellings."""

    stored: Collection[str] = ()

    def find(self, *spellings: str) -> str:
        """The spelling that is stored; the first where none is."""
        candidates = [prefix + name for name in spellings for prefix in _PREFIXES]
        return next((name for name in candidates if name in self.stored), spellings[0])

    def has(self, name: str) -> bool:
        return self.find(name) in self.stored

    @property
    def embed(self) -> str | None:
        """The drafter's own embedding table; None where it has none."""
        return self.find(_EMBED) if self.has(_EMBED) else None

    @property
    def shared(self) -> frozenset[str]:
        """What is stored and not loaded, as the target has it."""
        return frozenset(self.find(name) for name in _SHARED if self.has(name))


def check_drafter_layout(config: DrafterConfig, layout: Layout) -> None:
    """Raises ConfigError listing every size of the drafter that `layout` does not divide."""
    shape = config.attention
    sizes = {
        "num_attention_heads": shape.num_heads,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "target_hidden_size of all taps": len(config.taps) * config.target_hidden_size,
    }
    if isinstance(shape, GqaShape):
        sizes["num_key_value_heads"] = shape.num_kv_heads
    problems = [
        f"{name} {size} does not divide by tp {layout.tp}"
        for name, size in sizes.items()
        if size % layout.tp
    ]
    if problems:
        raise ConfigError(f"layout {layout.name}: drafter: " + "; ".join(problems))


def drafter_table(config: DrafterConfig, names: Names) -> Node:
    """The rows of a drafter, all but its embedding, which depends on values."""
    layers = range(config.num_hidden_layers)
    return Node(
        DrafterWeights,
        {
            "context": _context(config, names),
            "layers": tuple(_layer(config, names, layer) for layer in layers),
            "norm": _vector(
                names.find(*_spelled(config, "norm", "final_norm")), config.hidden_size
            ),
            "markov": _markov(config, names),
            "confidence": _confidence(config, names),
        },
    )


def _spelled(config: DrafterConfig, plain: str, k3: str) -> tuple[str, str]:
    """The two spellings of a tensor, the one of the config's format first."""
    first, second = f"{plain}.weight", f"{k3}.weight"
    return (second, first) if isinstance(config.attention, MlaShape) else (first, second)


def _context(c: DrafterConfig, names: Names) -> Node:
    taps, size, target = len(c.taps), c.hidden_size, c.target_hidden_size
    fc = names.find(*_spelled(c, "fc", "context_proj"))
    norms = [names.find(f"fc_norm.{tap}.weight") for tap in range(taps)]
    tap_norm = Row(tuple(Source(name, (target,), "BF16", view=as_row) for name in norms))
    return Node(
        ContextWeights,
        {
            "tap_norm": tap_norm if c.fc_norm else None,
            "fc": Row((Source(fc, (size, taps * target), "BF16", TAPS, dim=1),)),
            "norm": _vector(names.find(*_spelled(c, "hidden_norm", "context_norm")), size),
            **_cached(c, names),
        },
    )


def _cached(c: DrafterConfig, names: Names) -> dict[str, Row]:
    """Every layer's projection of what it caches, and the norm of that."""
    shape, layers = c.attention, range(c.num_hidden_layers)
    if isinstance(shape, MlaShape):
        entry = (shape.latent_dim, c.hidden_size)
        kv = [_attention(names, layer, "kv_a_proj_with_mqa") for layer in layers]
        sources = [Source(name, entry, "BF16") for name in kv]
        norm, width = "kv_a_layernorm", shape.kv_lora_rank
    else:
        sources = [source for layer in layers for source in _qkv(c, shape, names, layer)[1:]]
        norm, width = "k_norm", shape.head_dim
    weights = [_attention(names, layer, norm) for layer in layers]
    stacked = [Source(name, (width,), "BF16", view=as_row) for name in weights]
    return {"kv": Row(tuple(sources)), "kv_norm": Row(tuple(stacked))}


def _layer(c: DrafterConfig, names: Names, layer: int) -> Node:
    at, size, shape = f"layers.{layer}.", c.hidden_size, c.attention
    gate, up = (
        Source(names.find(f"{at}mlp.{x}_proj.weight"), (c.intermediate_size, size), "BF16", WIDTH)
        for x in ("gate", "up")
    )
    down = names.find(f"{at}mlp.down_proj.weight")
    attention = (
        _gqa(c, shape, names, layer)
        if isinstance(shape, GqaShape)
        else _mla(c, shape, names, layer)
    )
    return Node(
        DrafterLayerWeights,
        {
            "input_norm": _vector(names.find(f"{at}input_layernorm.weight"), size),
            "attention": attention,
            "post_attention_norm": _vector(
                names.find(f"{at}post_attention_layernorm.weight"), size
            ),
            "mlp": Node(
                MlpWeights,
                {
                    "gate_up": Row((gate, up)),
                    "down": Row((Source(down, (size, c.intermediate_size), "BF16", WIDTH, dim=1),)),
                },
            ),
        },
    )


def _attention(names: Names, layer: int, part: str) -> str:
    return names.find(f"layers.{layer}.self_attn.{part}.weight")


def _qkv(c: DrafterConfig, shape: GqaShape, names: Names, layer: int) -> tuple[Source, ...]:
    """q, k and v, stored one by one or as one tensor."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (count * shape.head_dim for count in heads)
    fused = f"layers.{layer}.self_attn.qkv_proj.weight"
    if names.has(fused):
        whole = names.find(fused), (q + k + v, c.hidden_size), "BF16", HEADS
        bounds = ((0, q), (q, q + k), (q + k, q + k + v))
        return tuple(Source(*whole, view=rows(*bound)) for bound in bounds)
    return tuple(
        Source(_attention(names, layer, f"{x}_proj"), (size, c.hidden_size), "BF16", HEADS)
        for x, size in zip("qkv", (q, k, v), strict=True)
    )


def _gqa(c: DrafterConfig, shape: GqaShape, names: Names, layer: int) -> Node:
    width = shape.num_heads * shape.head_dim
    o_proj = _attention(names, layer, "o_proj")
    return Node(
        GqaWeights,
        {
            "qkv": Row(_qkv(c, shape, names, layer)),
            "q_norm": _vector(_attention(names, layer, "q_norm"), shape.head_dim),
            "k_norm": _vector(_attention(names, layer, "k_norm"), shape.head_dim),
            "o_proj": Row((Source(o_proj, (c.hidden_size, width), "BF16", HEADS, dim=1),)),
        },
    )


def _mla(c: DrafterConfig, shape: MlaShape, names: Names, layer: int) -> Node:
    heads, rank, latent = shape.num_heads, shape.q_lora_rank, shape.kv_lora_rank
    nope, value = shape.qk_nope_head_dim, shape.v_head_dim

    def source(part: str, size: tuple[int, int], view: View = as_stored, dim: int = 0) -> Source:
        return Source(_attention(names, layer, part), size, "BF16", HEADS, dim, view)

    kv_b = "kv_b_proj", (heads * (nope + value), latent)
    q_b = source("q_b_proj", (heads * (nope + shape.qk_rope_head_dim), rank))
    q_a = Source(_attention(names, layer, "q_a_proj"), (rank, c.hidden_size), "BF16")
    kv_a = _attention(names, layer, "kv_a_proj_with_mqa")
    return Node(
        MlaWeights,
        {
            "proj": Row((q_a, Source(kv_a, (shape.latent_dim, c.hidden_size), "BF16"))),
            "q_norm": _vector(_attention(names, layer, "q_a_layernorm"), rank),
            "q_b": Row((q_b,)),
            "kv_norm": _vector(_attention(names, layer, "kv_a_layernorm"), latent),
            "w_k": Row((source(*kv_b, key_half(heads, nope)),)),
            "w_v": Row((source(*kv_b, value_half(heads, nope)),)),
            "o_proj": Row((source("o_proj", (c.hidden_size, heads * value), dim=1),)),
        },
    )


def _markov(c: DrafterConfig, names: Names) -> Node | None:
    if not c.markov_rank:
        return None
    w1, w2 = (
        names.find(f"markov_head.markov_{x}.weight", f"markov_{x}.weight") for x in ("w1", "w2")
    )
    size = (c.vocab_size, c.markov_rank)
    return Node(
        MarkovWeights,
        {"w1": Row((Source(w1, size, "BF16"),)), "w2": Row((Source(w2, size, "BF16", VOCAB),))},
    )


def _confidence(c: DrafterConfig, names: Names) -> Node | None:
    if not c.confidence_head:
        return None
    proj, bias = (
        names.find(f"confidence_head.proj.{x}", f"confidence_proj.{x}") for x in ("weight", "bias")
    )
    width = c.hidden_size + (c.markov_rank if c.confidence_with_markov else 0)
    return Node(
        ConfidenceWeights,
        {"proj": Row((Source(proj, (1, width), "BF16"),)), "bias": _vector(bias, 1)},
    )


def _vector(key: str, size: int) -> Row:
    return Row((Source(key, (size,), "BF16"),))
