"""The weights of the K3 family as data: every field of ModelWeights and where it is stored."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tercel.core.layout import Axis
from tercel.core.model import ModelConfig
from tercel.core.parameters import (
    AttnResWeights,
    ExpertWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from tercel.weights.formats import MATRIX_FORMATS, stored_parts, unread_parts
from tercel.weights.rows import Node, Row, Source, matrix
from tercel.weights.transforms import first, flatten, key_half, squeeze_taps, value_half

HEADS, WIDTH, EXPERT_WIDTH, VOCAB = Axis.HEADS, Axis.WIDTH, Axis.EXPERT_WIDTH, Axis.VOCAB
LATENT = Axis.LATENT


@dataclass(frozen=True)
class Family:
    """How one family's checkpoints spell and store what both have."""

    name: str
    prefix: str
    small_dtype: str
    """Published dtype of the convolutions and o_norm."""
    A_log_shape: Callable[[int], tuple[int, ...]]
    """Published shape of A_log for so many heads."""


KIMI_K3 = Family("kimi_k3", "language_model.", "F32", lambda heads: (-(-heads // 128) * 128,))
KIMI_LINEAR = Family("kimi_linear", "", "BF16", lambda heads: (1, 1, heads, 1))

NOT_LOADED = {"vision_tower.": "vision tower", "mm_projector.": "vision projector"}
"""Prefix -> name of what a K3 checkpoint holds and the text model does not read."""
UNREAD = "activation scales"
"""Name of what lies beside quantized weights and weight-only arithmetic (W4A16) does not use."""


def model_table(
    config: ModelConfig,
    family: Family,
    format_of: Callable[[str], str],
    layers: range | None = None,
) -> Node:
    """The rows of a model, or of the pipeline stage that has `layers`. `format_of` names the format
    of a matrix by its key without `.weight`: one of MATRIX_FORMATS for the experts, plain or
    fp8_block for what else a layer multiplies with.
    """
    at = f"{family.prefix}model."
    N = config.hidden_size
    chosen = range(config.num_hidden_layers) if layers is None else layers
    is_first, is_last = chosen.start == 0, chosen.stop == config.num_hidden_layers
    attn_res = config.attn_res_block_size is not None
    embed = matrix(f"{at}embed_tokens", config.vocab_size, N, VOCAB)
    head = matrix(f"{family.prefix}lm_head", config.vocab_size, N, VOCAB)
    return Node(
        ModelWeights,
        {
            "embed": Row((embed,)) if is_first else None,
            "layers": tuple(_layer(config, family, layer, format_of) for layer in chosen),
            "output_res": _attn_res(f"{at}output_attn_res", N) if attn_res and is_last else None,
            "norm": _vector(f"{at}norm", N) if is_last else None,
            "head": Row((head,)) if is_last else None,
        },
    )


def _layer(c: ModelConfig, family: Family, layer: int, format_of: Callable[[str], str]) -> Node:
    at = f"{family.prefix}model.layers.{layer}."
    N = c.hidden_size
    attn_res = c.attn_res_block_size is not None
    if c.is_mla(layer):
        attention = _mla(c, f"{at}self_attn.")
    else:
        attention = _kda(c, family, f"{at}self_attn.")
    if c.is_moe(layer):
        mlp = _moe(c, f"{at}block_sparse_moe.", format_of)
    else:
        mlp = _mlp(f"{at}mlp.", c.intermediate_size, N)
    return Node(
        LayerWeights,
        {
            "input_norm": _vector(f"{at}input_layernorm", N),
            "attention": _as_stored(attention, format_of),
            "post_attention_norm": _vector(f"{at}post_attention_layernorm", N),
            "mlp": _as_stored(mlp, format_of),
            "attention_res": _attn_res(f"{at}self_attention_res", N) if attn_res else None,
            "mlp_res": _attn_res(f"{at}mlp_res", N) if attn_res else None,
        },
    )


def _kda(c: ModelConfig, family: Family, at: str) -> Node:
    H, N, P, F = c.kda_num_heads, c.hidden_size, c.kda_size, c.kda_head_dim
    q, k, v = (matrix(f"{at}{x}_proj", P, N, HEADS) for x in "qkv")
    full_rank = c.kda_full_rank_gate
    gate = matrix(f"{at}g_proj", P, N, HEADS) if full_rank else matrix(f"{at}g_a_proj", F, N)
    f_a, b = matrix(f"{at}f_a_proj", F, N), matrix(f"{at}b_proj", H, N, HEADS)
    taps = [
        Source(
            f"{at}{x}_conv1d.weight",
            (P, 1, c.conv_kernel_size),
            family.small_dtype,
            HEADS,
            view=squeeze_taps,
        )
        for x in "qkv"
    ]
    A_log = Source(f"{at}A_log", family.A_log_shape(H), "F32", HEADS, view=first(H), used=H)
    return Node(
        KdaWeights,
        {
            "proj": Row((q, k, v, gate, f_a, b)),
            "f_b": Row((matrix(f"{at}f_b_proj", P, F, HEADS),)),
            "g_b": None if full_rank else Row((matrix(f"{at}g_b_proj", P, F, HEADS),)),
            "conv": Row(tuple(taps), torch.float32),
            "A_log": Row((A_log,), torch.float32),
            "dt_bias": Row((Source(f"{at}dt_bias", (P,), "F32", HEADS),), torch.float32),
            "o_norm": Row((Source(f"{at}o_norm.weight", (F,), family.small_dtype),), torch.float32),
            "o_proj": Row((matrix(f"{at}o_proj", N, P, HEADS, dim=1),)),
        },
    )


def _mla(c: ModelConfig, at: str) -> Node:
    H, N, Q, R = c.num_attention_heads, c.hidden_size, c.q_lora_rank, c.kv_lora_rank
    K, V = c.qk_nope_head_dim, c.v_head_dim
    q_size = H * c.qk_head_dim
    query = matrix(f"{at}q_proj", q_size, N, HEADS) if Q is None else matrix(f"{at}q_a_proj", Q, N)
    proj = [query, matrix(f"{at}kv_a_proj_with_mqa", c.mla_latent_dim, N)]
    if c.mla_output_gate:
        proj.append(matrix(f"{at}g_proj", H * V, N, HEADS))
    kv_b = f"{at}kv_b_proj.weight", (H * (K + V), R), "BF16", HEADS
    return Node(
        MlaWeights,
        {
            "proj": Row(tuple(proj)),
            "q_norm": None if Q is None else _vector(f"{at}q_a_layernorm", Q),
            "q_b": None if Q is None else Row((matrix(f"{at}q_b_proj", q_size, Q, HEADS),)),
            "kv_norm": _vector(f"{at}kv_a_layernorm", R),
            "w_k": Row((Source(*kv_b, view=key_half(H, K)),)),
            "w_v": Row((Source(*kv_b, view=value_half(H, K)),)),
            "o_proj": Row((matrix(f"{at}o_proj", N, H * V, HEADS, dim=1),)),
        },
    )


def _attn_res(at: str, size: int) -> Node:
    proj = Source(f"{at}_proj.weight", (1, size), "BF16", view=flatten)
    return Node(AttnResWeights, {"norm": _vector(f"{at}_norm", size), "proj": Row((proj,))})


def _mlp(at: str, width: int, size: int) -> Node:
    gate, up = (matrix(f"{at}{x}_proj", width, size, WIDTH) for x in ("gate", "up"))
    down = matrix(f"{at}down_proj", size, width, WIDTH, dim=1)
    return Node(MlpWeights, {"gate_up": Row((gate, up)), "down": Row((down,))})


def _moe(c: ModelConfig, at: str, format_of: Callable[[str], str]) -> Node:
    N, L, E = c.hidden_size, c.latent_size, c.num_experts
    bias = Source(f"{at}gate.e_score_correction_bias", (E,), "F32")
    latent = c.routed_expert_hidden_size is not None
    norm = _vector(f"{at}routed_expert_norm", L) if c.latent_moe_use_norm else None
    up = matrix(f"{at}routed_expert_up_proj", N, L, LATENT, dim=1)
    return Node(
        MoeWeights,
        {
            "router": Row((matrix(f"{at}gate", E, N),)),
            "router_bias": Row((bias,), torch.float32),
            "down": Row((matrix(f"{at}routed_expert_down_proj", L, N),)) if latent else None,
            "experts": _experts(c, f"{at}experts.", format_of),
            "latent_norm": norm,
            "up": Row((up,)) if latent else None,
            "shared": _mlp(f"{at}shared_experts.", c.shared_intermediate_size, N),
        },
    )


def _experts(c: ModelConfig, at: str, format_of: Callable[[str], str]) -> Node:
    L, I = c.latent_size, c.moe_intermediate_size
    w1, w3 = (matrix(f"{at}{{expert}}.{x}", I, L, EXPERT_WIDTH) for x in ("w1", "w3"))
    w2 = matrix(f"{at}{{expert}}.w2", L, I, EXPERT_WIDTH, dim=1)
    form = MATRIX_FORMATS[format_of(f"{at}0.w1")]
    fields: dict[str, Row | None] = dict.fromkeys(
        ("w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2")
    )
    for suffix, stored in form.fields.items():
        for name, matrices in (("w13", (w1, w3)), ("w2", (w2,))):
            sources = tuple(stored_parts(each, form)[suffix] for each in matrices)
            beside = [part for each in matrices for part in unread_parts(each, form)]
            unread = () if suffix else tuple(beside)
            fields[name + suffix] = Row(sources, stored.row_dtype, c.num_experts, unread)
    return Node(ExpertWeights, fields)


def _as_stored(node: Node, format_of: Callable[[str], str]) -> Node:
    """The node with its plain matrices in FP8 blocks where `format_of` says so."""
    form = MATRIX_FORMATS["fp8_block"]

    def stored(source: Source) -> Source:
        key, _, leaf = source.key.rpartition(".")
        is_matrix = leaf == "weight" and len(source.shape) == 2 and source.dtype == "BF16"
        is_fp8 = is_matrix and "{" not in key and format_of(key) == "fp8_block"
        return stored_parts(source, form)[""] if is_fp8 else source

    return node.map(lambda row: replace(row, sources=tuple(map(stored, row.sources))))


def _vector(key: str, size: int) -> Row:
    return Row((Source(f"{key}.weight", (size,), "BF16"),))
