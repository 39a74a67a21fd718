"""Kimi K3, the text model, in plain torch: what it computes, in one file, without a cache.

What differs from a textbook transformer:

- No positional encoding anywhere. Order comes from the causal mask, the recurrence and a width-4
  convolution; the 64 "rope" dims of MLA exist but are never rotated (NoPE).
- Two kinds of attention. Three layers in four are Kimi Delta Attention (KDA): a delta-rule
  recurrence over a [K, V] state per head, whose decay is a vector, one rate per key channel.
  Every fourth layer, and the last, is multi-head latent attention (MLA).
- KDA's log decay is bounded below: `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`, not a clamp
  of Kimi-Linear's `-exp(A_log) * softplus(f + dt_bias)`. `A_log` is one number per head.
- MLA squeezes queries as well as keys and values through a normalised latent, and multiplies the
  attention output by a sigmoid gate of the layer's input. The latent norms use eps 1e-6, every
  other norm `rms_norm_eps`.
- Attention residuals instead of a residual stream. The running sum of sublayer outputs restarts
  every 12 layers and its last value is kept as a snapshot; each sublayer reads a softmax mixture
  of the snapshots and the current sum, and that mixture is never added back.
- Latent mixture of experts. Routed experts live in a half-width latent: down-projection, experts,
  weighted sum, RMSNorm *of the sum*, up-projection. Router and shared experts see the full width.
- Sigmoid routing. Experts are chosen by score plus a selection bias, weighted by score alone.
- SiTU-GLU instead of SwiGLU: `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`.
- No bias in any projection, no weight tying, no logit scale, no multi-token prediction.

Kimi-Linear is the same program under other configuration keys: softplus decay, low-rank output
gate, direct queries, no MLA gate, experts on the hidden width, SwiGLU, and no snapshots, which
turns attention residuals into an ordinary pre-norm residual stream.

Shapes: B batch, T tokens, H heads, K and V key and value channels, E experts, I expert width, L
latent width, N = B*T rows. Activations have the parameters' dtype. "Wide" is fp32, or fp64 for fp64
activations: the official precision of norms, router, softmax, gates, recurrence and expert sum. So
an fp32 or fp64 model never rounds in between.

Source: configuration and modeling files of moonshotai/Kimi-K3 and Kimi-Linear-48B-A3B-Instruct;
arXiv 2510.26692 (Kimi Linear); flash-linear-attention (the KDA gate).
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Tensor]
Capture = Callable[[int, Tensor, Tensor], None]

ONLY = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "n_group": 1,
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Keys that change the forward, and the one value of each that is computed here."""

INERT = """
    _name_or_path architectures auto_map bos_token_id dtype eos_token_id head_dim linear_attn_config
    max_position_embeddings model_max_length model_type num_key_value_heads pad_token_id
    quantization_config rope_theta torch_dtype transformers_version use_cache use_grouped_topk
"""
"""Keys that do not change it: with NoPE no rope, with one group no groups."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of config.json that change the forward, under their published names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    initializer_range: float = 0.02
    attn_res_block_size: int | None = None
    """Layers between two snapshots; None is an ordinary residual stream."""
    num_attention_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool = False
    latent_norm_eps: float = 1e-6
    """eps of q_a_layernorm and kv_a_layernorm: no published key, the official class default."""

    kda_layers: tuple[int, ...]
    """0-based (config.json counts from 1); every other layer is MLA."""
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    use_full_rank_gate: bool = False
    gate_lower_bound: float | None = None
    """Least log decay per token; None is the unbounded softplus form."""

    hidden_act: str
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    routed_expert_hidden_size: int | None = None
    """Latent width L of the routed experts; None is the hidden width, without projections."""
    latent_moe_use_norm: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a parsed config.json, with or without its `text_config` level.

        Raises:
            ValueError: a key that is missing, unknown, or has a value this file does not compute.
        """
        text = config.get("text_config", config)
        renamed = {"num_heads": "kda_num_heads", "head_dim": "kda_head_dim"}
        keys = dict(text)
        for key, value in text["linear_attn_config"].items():
            keys[renamed.get(key, key)] = value
        check_keys(keys, config)
        keys["kda_layers"] = tuple(layer - 1 for layer in keys["kda_layers"])
        return cls(**{field.name: keys[field.name] for field in fields(cls) if field.name in keys})


def check_keys(keys: Mapping[str, Any], wrapper: Mapping[str, Any]) -> None:
    """Refuses what would be ignored although it changes the forward."""
    required = {"full_attn_layers", "mla_use_nope", "moe_router_activation_func"}
    required |= {field.name for field in fields(Config) if field.default is MISSING}
    known = required | {field.name for field in fields(Config)} | ONLY.keys() | set(INERT.split())
    missing, unknown = sorted(required - keys.keys()), sorted(keys.keys() - known)
    if missing or unknown:
        raise ValueError(f"config.json lacks {missing} and has unknown keys {unknown}")
    heads, act = keys["num_attention_heads"], keys["hidden_act"]
    only = {**ONLY, "num_key_value_heads": heads, "hidden_act": "silu" if act == "silu" else "situ"}
    for key, supported in only.items():
        value = keys.get(key, wrapper.get(key, supported))
        if value != supported:
            raise ValueError(f"config key {key} is {value!r}; only {supported!r} is computed here")
    layers = sorted([*keys["kda_layers"], *keys["full_attn_layers"]])
    if layers != list(range(1, keys["num_hidden_layers"] + 1)):
        raise ValueError("kda_layers and full_attn_layers must split 1..num_hidden_layers")


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 where it already is."""
    return x if x.dtype == torch.float64 else x.float()


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def normalize(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, wide."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """weight * x / rms(x); the normalised x is rounded to the activations' dtype first."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalize(x, self.eps).to(x.dtype)


def add_attention_residual(owner: nn.Module, site: str, c: Config) -> None:
    owner.add_module(f"{site}_norm", RMSNorm(c.hidden_size, c.rms_norm_eps))
    owner.add_module(f"{site}_proj", linear(c.hidden_size, 1))


def attention_residual(
    owner: nn.Module, site: str, snapshots: list[Tensor], prefix: Tensor
) -> Tensor:
    """What a sublayer reads: a softmax mixture, per token, of the snapshots and the current sum.

    Scores see the normalised sources, the mixture is of the sources themselves: [B, T, hidden].
    """
    if not snapshots:  # before the first, and in Kimi-Linear
        return prefix
    norm, proj = getattr(owner, f"{site}_norm"), getattr(owner, f"{site}_proj")
    sources = wide(torch.stack([*snapshots, prefix]))
    scores = normalize(sources, norm.eps) @ (wide(norm.weight) * wide(proj.weight[0]))
    return (scores.softmax(0)[..., None] * sources).sum(0).to(prefix.dtype)


class MultiHeadLatentAttention(nn.Module):
    """Causal attention over keys and values expanded from one normalised latent per token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        heads, key_dim = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        if c.q_lora_rank is None:
            self.q_proj = linear(c.hidden_size, heads * key_dim)
        else:
            self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
            self.q_b_proj = linear(c.q_lora_rank, heads * key_dim)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        if c.mla_use_output_gate:
            self.g_proj = linear(c.hidden_size, heads * c.v_head_dim)
        self.o_proj = linear(heads * c.v_head_dim, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        c, heads = self.c, self.c.num_attention_heads
        if c.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        sizes = [c.kv_lora_rank, c.qk_rope_head_dim]
        latent, k_shared = self.kv_a_proj_with_mqa(x).split(sizes, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k = torch.cat([k, k_shared[..., None, :].expand(*k.shape[:-1], -1)], -1)
        q, k, v = (u.transpose(1, 2) for u in (q.unflatten(-1, (heads, -1)), k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5)
        o = o.transpose(1, 2).flatten(2)
        if c.mla_use_output_gate:
            o = o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o)


def l2_normalize(x: Tensor) -> Tensor:
    """Unit length over the last axis, wide; eps is added to the sum of squares, not to its mean."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, token by token, from a zero state.

    Decay the state, predict v from k, write beta times the error at k, read with q.

    Args:
        q, k: [B, T, H, K], wide. L2-normalised; q is scaled by K**-0.5.
        v: [B, T, H, V], the activations' dtype.
        g: [B, T, H, K], wide. Log decay per key channel, <= 0.
        beta: [B, T, H], wide. Writing strength in (0, 1).
    Returns:
        [B, T, H, V] in v's dtype.
    """
    B, T, H, K = k.shape
    state = g.new_zeros(B, H, K, v.shape[-1])
    outputs = []
    for t in range(T):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1).to(v.dtype)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution, then SiLU; the last tap multiplies the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        channels, _, width = self.weight.shape
        history = F.pad(wide(x).transpose(1, 2), (width - 1, 0))
        y = F.conv1d(history, self.weight.to(history.dtype), groups=channels)
        return F.silu(y).transpose(1, 2).to(x.dtype)


class KimiDeltaAttention(nn.Module):
    """Linear attention with a per-channel decay, an L2-normalised q and k and a gated output."""

    def __init__(self, c: Config, kda: Function) -> None:
        super().__init__()
        self.c, self.kda = c, kda
        heads, dim, hidden = c.kda_num_heads, c.kda_head_dim, c.hidden_size
        channels = heads * dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, channels) for _ in range(3))
        convolutions = (ShortConvolution(channels, c.short_conv_kernel_size) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convolutions
        self.f_a_proj, self.f_b_proj = linear(hidden, dim), linear(dim, channels)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(channels))
        self.b_proj = linear(hidden, heads)
        if c.use_full_rank_gate:
            self.g_proj = linear(hidden, channels)
        else:
            self.g_a_proj, self.g_b_proj = linear(hidden, dim), linear(dim, channels)
        self.o_norm = RMSNorm(dim, c.rms_norm_eps)
        self.o_proj = linear(channels, hidden)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.c.kda_num_heads, self.c.kda_head_dim))

    def log_decay(self, x: Tensor) -> Tensor:
        """[B, T, H, K], wide."""
        rate = wide(self.A_log).exp()[:, None]
        f = self.heads(wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias))
        if self.c.gate_lower_bound is None:
            return -rate * F.softplus(f)
        return self.c.gate_lower_bound * torch.sigmoid(rate * f)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(self.q_conv1d(self.q_proj(x)))
        k = self.heads(self.k_conv1d(self.k_proj(x)))
        v = self.heads(self.v_conv1d(self.v_proj(x)))
        beta = torch.sigmoid(wide(self.b_proj(x)))
        q, k = l2_normalize(q) * self.c.kda_head_dim**-0.5, l2_normalize(k)
        o = self.kda(q, k, v, self.log_decay(x), beta)
        gate = self.g_proj(x) if self.c.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        o = normalize(o, self.o_norm.eps) * self.o_norm.weight * wide(self.heads(gate)).sigmoid()
        return self.o_proj(o.to(x.dtype).flatten(2))


def activation(c: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """act(gate, up) of every MLP and expert: computed wide, rounded once."""
    beta, linear_beta = c.activation_situ_beta or 1.0, c.activation_situ_linear_beta

    def glu(gate: Tensor, up: Tensor) -> Tensor:
        g, u = wide(gate), wide(up)
        if c.hidden_act == "silu":
            return (F.silu(g) * u).to(gate.dtype)
        u = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
        return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)

    return glu


class MLP(nn.Module):
    """Gated MLP: the dense layers and the shared experts."""

    def __init__(self, c: Config, width: int) -> None:
        super().__init__()
        self.act = activation(c)
        self.gate_proj, self.up_proj = (linear(c.hidden_size, width) for _ in range(2))
        self.down_proj = linear(width, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Chooses experts by score plus selection bias; weights and gradients ignore the bias."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.zeros(c.num_experts, c.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(c.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> ids [N, k] int64 and weights [N, k] wide, in no particular order."""
        scores, k = torch.sigmoid(wide(x) @ wide(self.weight).T), self.c.num_experts_per_token
        ids = (scores + self.e_score_correction_bias).topk(k, sorted=False).indices
        weights = scores.gather(-1, ids)
        if self.c.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.c.routed_scaling_factor


def naive_experts(
    z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Function
) -> Tensor:
    """Sum over the k slots of weight * w2 act(w1 z, w3 z), one expert after the other.

    Args:
        z: [N, L].
        ids, weights: [N, k], int64 and wide. The ids of a row differ.
        w1, w3: [E, I, L], gate and up.
        w2: [E, L, I].
    Returns:
        [N, L] in z's dtype; weighted and summed wide.
    """
    slots = z.new_zeros(*ids.shape, z.shape[-1])
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = act(F.linear(z[row], w1[expert]), F.linear(z[row], w3[expert]))
        slots[row, slot] = F.linear(hidden, w2[expert])
    return (weights[..., None] * wide(slots)).sum(1).to(z.dtype)


class LatentMoE(nn.Module):
    """Routed experts in a latent of the hidden state, plus the shared experts on all of it."""

    def __init__(self, c: Config, experts: Function) -> None:
        super().__init__()
        self.run_experts, self.act = experts, activation(c)
        self.gate = Router(c)
        E, I, hidden = c.num_experts, c.moe_intermediate_size, c.hidden_size
        L = c.routed_expert_hidden_size or hidden
        shapes = {"w1": (E, I, L), "w3": (E, I, L), "w2": (E, L, I)}
        self.experts = nn.ParameterDict({name: torch.zeros(shapes[name]) for name in shapes})
        projection = nn.Identity if c.routed_expert_hidden_size is None else linear
        norm = RMSNorm if c.latent_moe_use_norm else nn.Identity
        self.routed_expert_down_proj = projection(hidden, L)
        self.routed_expert_norm = norm(L, c.rms_norm_eps)
        self.routed_expert_up_proj = projection(L, hidden)
        self.shared_experts = MLP(c, c.num_shared_experts * c.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        rows, w = x.flatten(0, 1), self.experts
        ids, weights = self.gate(rows)
        z = self.routed_expert_down_proj(rows)
        y = self.run_experts(z, ids, weights, w["w1"], w["w3"], w["w2"], self.act)
        y = self.routed_expert_up_proj(self.routed_expert_norm(y))
        return y.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One attention and one MLP sublayer, each reading a mixture and adding to the prefix."""

    def __init__(self, c: Config, index: int, kda: Function, experts: Function) -> None:
        super().__init__()
        is_kda = index in c.kda_layers
        self.self_attn = KimiDeltaAttention(c, kda) if is_kda else MultiHeadLatentAttention(c)
        if index < c.first_k_dense_replace:
            self.mlp = MLP(c, c.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoE(c, experts)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        block = c.attn_res_block_size
        self.starts_block = block is not None and index % block == 0
        if block is not None:
            add_attention_residual(self, "self_attention_res", c)
            add_attention_residual(self, "mlp_res", c)

    def forward(self, mixture: Tensor, prefix: Tensor, snapshots: list[Tensor]) -> Tensor:
        """The prefix after this layer. `mixture` is what attention reads, chosen by the caller."""
        attn = self.self_attn(self.input_layernorm(mixture))
        prefix = attn if self.starts_block else prefix + attn
        mixture = attention_residual(self, "mlp_res", snapshots, prefix)
        mlp = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return prefix + mlp(self.post_attention_layernorm(mixture))


class Decoder(nn.Module):
    """Embedding, layers, final norm. Owns the snapshots."""

    def __init__(self, c: Config, kda: Function, experts: Function) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers = (Layer(c, index, kda, experts) for index in range(c.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        if c.attn_res_block_size is not None:
            add_attention_residual(self, "output_attn_res", c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, tokens: Tensor, capture: Capture | None) -> Tensor:
        readers = [(layer, "self_attention_res") for layer in self.layers[1:]]
        readers.append((self, "output_attn_res"))
        mixture = prefix = self.embed_tokens(tokens)
        snapshots: list[Tensor] = []
        for index, (layer, reader) in enumerate(zip(self.layers, readers, strict=True)):
            if layer.starts_block:
                # After the mixture for attention was taken: it sees this prefix once.
                snapshots = [*snapshots, prefix]
            prefix = layer(mixture, prefix, snapshots)
            mixture = attention_residual(*reader, snapshots, prefix)
            if capture is not None:
                capture(index, prefix, mixture)
        return self.norm(mixture)


class Model(nn.Module):
    """The text model; parameters carry the checkpoint's names, without `language_model.`.

    Only the routed experts differ: one stacked tensor per matrix, `...experts.w1`. Values come
    from weights.py. `kda` and `experts` are called as `recurrent_kda` and `naive_experts` are.
    """

    def __init__(
        self, config: Config, *, kda: Function = recurrent_kda, experts: Function = naive_experts
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, kda, experts)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, *, capture: Capture | None = None) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, vocab] in the parameters' dtype.

        `capture` is called after each layer with its 0-based index, the prefix, and the mixture
        that the next attention (after the last layer: the head) reads, before its norm.
        """
        return self.lm_head(self.model(tokens, capture))
