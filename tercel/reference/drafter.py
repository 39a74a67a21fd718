"""A block drafter in plain torch: what DSpark and DFlash compute, in one file, without a cache.

A drafter guesses the target's next few tokens, which the target then checks in one step. What
differs from an autoregressive drafter, that is, from a small language model of its own:

- All guesses come from one forward. The input is a block: the *anchor*, the last token that is
  known, and after it one mask token per further guess. Nothing is fed back through the layers.
- It never embeds the text before the anchor. What it knows of it are *taps*: the target's own
  hidden rows after a few of its layers, concatenated and projected once to a context row c.
- Every layer makes keys and values of that same c with the weights that serve the block's rows,
  and without the block's input norm. So context costs nothing per layer but its keys and values.
- Attention is not causal: each row of the block sees all of the context before the anchor and the
  whole block. A layer may slide over the context, or be causal within the block.
- The anchor has no context row yet: the target has not run it. Context is strictly before it.
- It shares the target's head, and the target's embedding but for the row of the mask token, which
  may have been trained, or a whole table of its own.
- DSpark only: guesses are chained by a first-order *Markov head*, a low-rank bias on the logits
  that depends on the guess before, and a *confidence head* estimates each one's chance to be
  accepted. DFlash is the case without heads.

Slots: in a DSpark block slot j predicts position n + 1 + j, the anchor's own slot included, so g
guesses take g slots. In a plain DFlash block a mask sits *at* the position that it predicts and
the anchor's slot predicts nothing: g guesses take g + 1 slots. `anchor_predicts` says which.

A tap is the output of a decoder layer of the target. Where the target has attention residuals that
is one of two streams, and a drafter is trained on one of them: the prefix sum, or the mixture that
the next layer's norm reads. The wrong one, like any wrong wiring here, costs acceptance only.

Shapes: B sequences, S context tokens, N anchors per sequence, g guesses, W slots, X hidden size, V
vocabulary. With N = 1 and the anchor at S this is a decoding step; with anchors inside the
sequence it is a training batch, in which blocks do not see each other.

Source: DSpark, arXiv 2607.05147, and deepseek-ai/DeepSpec; DFlash, arXiv 2602.06036; YaRN, arXiv
2309.00071, as transformers and DeepSeek-V3 apply it; the published Kimi K3 drafters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Choose = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Rotation frequencies stretched for contexts longer than those trained on."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    """Rotations within the original context from which a frequency is left as it is."""
    beta_slow: float = 1.0
    """Rotations below which it is divided by the factor."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Scale of cos and sin; None: from the factor and the two above."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A drafter; the fields of either attention are None for the other."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float
    attention: Literal["gqa", "mla"]
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    rope_theta: float
    rope_interleaved: bool = False
    """Which pairs of channels turn: neighbours, or (NeoX) one of each half."""
    yarn: Yarn | None = None
    windows: tuple[int | None, ...] | None = None
    """Per layer: how far a slot sees; None: over everything."""
    window_from_anchor: bool = False
    """A window of w is the w context rows before the anchor, for every slot; otherwise it is the
    rows less than w positions away from the slot."""
    causal: tuple[bool, ...] | None = None
    """Per layer: whether a slot sees only the block's earlier slots and itself."""

    target_hidden_size: int
    tap_ids: tuple[int, ...]
    """Layers of the target, ascending."""
    tap_ids_name: Literal["outputs", "inputs"] = "outputs"
    """What the ids count: 0-based layers whose output is tapped, or those whose input is."""
    tap_stream: Literal["mixture", "prefix"] = "mixture"
    fc_norm: bool = False
    """Whether each tap has a norm of its own before the projection."""

    block_size: int
    """Slots that the drafter was trained with; fewer may be run."""
    anchor_predicts: bool = True
    mask_token_id: int
    embedding: Literal["target", "mask_row", "own"] = "target"
    """Whose rows enter the block: all the target's; the target's but for the mask token's; or all
    the drafter's own."""
    markov_rank: int = 0
    """0: guesses are independent."""
    confidence_head: bool = False
    confidence_with_markov: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based layers whose output is tapped."""
        shift = 0 if self.tap_ids_name == "outputs" else 1
        taps = tuple(tap - shift for tap in self.tap_ids)
        if min(taps) < 0 or list(taps) != sorted(set(taps)):
            raise ValueError(f"tap_ids {self.tap_ids} must ascend and name outputs of layers")
        return taps

    @property
    def rope_dim(self) -> int:
        dim = self.head_dim if self.attention == "gqa" else self.qk_rope_head_dim
        assert dim is not None
        return dim

    def width(self, num_drafts: int) -> int:
        """Slots that `num_drafts` guesses take."""
        width = num_drafts if self.anchor_predicts else num_drafts + 1
        if not 1 <= width <= self.block_size or num_drafts < 1:
            raise ValueError(f"{num_drafts} drafts do not fit a block of {self.block_size}")
        return width


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 where it already is."""
    return x if x.dtype == torch.float64 else x.float()


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide(x) * scale).to(x.dtype)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much sharper attention gets over a context `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(c: Config) -> Tensor:
    """[rope_dim / 2] radians per position, fp64."""
    dim, yarn = c.rope_dim, c.yarn
    frequencies = c.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return frequencies

    def channel(rotations: float) -> float:
        """The pair of channels that makes so many rotations within the original context."""
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(c.rope_theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / yarn.factor * stretched


def rotation_scale(c: Config) -> float:
    """What multiplies cos and sin."""
    if c.yarn is None:
        return 1.0
    if c.yarn.attention_factor is not None:
        return c.yarn.attention_factor
    of_all = yarn_mscale(c.yarn.factor, c.yarn.mscale_all_dim or 0.0)
    return yarn_mscale(c.yarn.factor, c.yarn.mscale or 1.0) / of_all


def softmax_scale(c: Config) -> float:
    """With MLA, YaRN sharpens the channels that do not turn through the scale of the scores."""
    if c.attention == "gqa":
        return c.rope_dim**-0.5
    assert c.qk_nope_head_dim is not None
    mscale = 1.0 if c.yarn is None else yarn_mscale(c.yarn.factor, c.yarn.mscale_all_dim or 0.0)
    return (c.qk_nope_head_dim + c.rope_dim) ** -0.5 * mscale**2


def rotate(x: Tensor, positions: Tensor, c: Config) -> Tensor:
    """RoPE on [B, T, heads, rope_dim] at positions [B, T]."""
    angles = positions[..., None, None] * inverse_frequencies(c).to(x.device)
    cos, sin = (part.to(x.dtype) * rotation_scale(c) for part in (angles.cos(), angles.sin()))
    first, second = (x[..., ::2], x[..., 1::2]) if c.rope_interleaved else x.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if c.rope_interleaved else torch.cat(turned, -1)


class Attention(nn.Module):
    """Rows of blocks attend to context rows and to blocks, by a mask."""

    o_proj: nn.Linear

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, T, heads, key channels]."""
        raise NotImplementedError

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, heads or fewer, channels] each."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Tensor
    ) -> Tensor:
        """x [B, Q, X] and context [B, S, X] -> [B, Q, X]; mask [B, Q, S + Q] is true where seen."""
        q = self.queries(x, positions)
        rows = torch.cat([context, x], 1)
        k, v = self.keys_values(rows, torch.cat([context_positions, positions], 1))
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None], scale=softmax_scale(self.c), enable_gqa=True
        )
        return self.o_proj(o.transpose(1, 2).flatten(2))


class GroupedQueryAttention(Attention):
    """Keys and queries are normalised per head, then turned."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        assert c.num_key_value_heads is not None and c.head_dim is not None
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj, self.v_proj = (
            linear(c.hidden_size, c.num_key_value_heads * c.head_dim) for _ in range(2)
        )
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.c.rope_dim))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(self.q_norm(self.heads(self.q_proj(x))), positions, self.c)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = rotate(self.k_norm(self.heads(self.k_proj(x))), positions, self.c)
        return k, self.heads(self.v_proj(x))


class MultiHeadLatentAttention(Attention):
    """Keys and values are expanded from one normalised latent per token; unlike Kimi K3's, a part
    of the channels turns with the position and there is no output gate."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        assert c.kv_lora_rank is not None and c.q_lora_rank is not None
        assert c.qk_nope_head_dim is not None and c.v_head_dim is not None
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.rope_dim
        self.key_split, self.value_split = (nope, rope), (nope, c.v_head_dim)
        self.latent_split = (c.kv_lora_rank, rope)
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = linear(c.q_lora_rank, heads * sum(self.key_split))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, sum(self.latent_split))
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * sum(self.value_split))
        self.o_proj = linear(heads * c.v_head_dim, c.hidden_size)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        still, turning = q.unflatten(-1, (self.c.num_attention_heads, -1)).split(self.key_split, -1)
        return torch.cat([still, rotate(turning, positions, self.c)], -1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        latent, turning = self.kv_a_proj_with_mqa(x).split(self.latent_split, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        k, v = kv.unflatten(-1, (self.c.num_attention_heads, -1)).split(self.value_split, -1)
        turned = rotate(turning[..., None, :], positions, self.c)
        return torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            linear(c.hidden_size, c.intermediate_size) for _ in range(2)
        )
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm layer whose attention also sees the context, which has no norm here."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        attention = GroupedQueryAttention if c.attention == "gqa" else MultiHeadLatentAttention
        self.self_attn, self.mlp = attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, h: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Tensor
    ) -> Tensor:
        x = self.input_layernorm(h)
        h = h + self.self_attn(x, positions, context, context_positions, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class MarkovHead(nn.Module):
    """A bias on the logits of a token, of low rank, by the token before it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = linear(c.markov_rank, c.vocab_size)

    def forward(self, previous: Tensor) -> Tensor:
        """[...] -> [..., V]."""
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """A slot's chance that its guess is accepted, given that those before it were."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        markov = c.markov_rank if c.confidence_with_markov else 0
        self.proj = nn.Linear(c.hidden_size + markov, 1)


class Taps:
    """What the target's `capture` reports, for the layers and the stream of a drafter."""

    def __init__(self, c: Config) -> None:
        self.c = c
        self.rows: dict[int, Tensor] = {}

    def __call__(self, layer: int, prefix: Tensor, mixture: Tensor) -> None:
        if layer in self.c.taps:
            self.rows[layer] = mixture if self.c.tap_stream == "mixture" else prefix

    def features(self) -> Tensor:
        """[B, S, taps * target hidden], in order of the layers."""
        return torch.cat([self.rows[layer] for layer in self.c.taps], -1)


class Draft(NamedTuple):
    tokens: Tensor
    """[B, N, g]."""
    logits: Tensor
    """[B, N, g, V] wide, with the bias: what the tokens were chosen from."""
    confidence: Tensor | None
    """[B, N, g] logits of the chance to be accepted."""


def greedy(logits: Tensor, slot: int) -> Tensor:
    return logits.argmax(-1)


class Drafter(nn.Module):
    """Parameters carry the names of a SpecForge checkpoint; MLA drafters spell three otherwise."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        hidden, eps, count = c.hidden_size, c.rms_norm_eps, len(c.taps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, eps) for _ in range(count))
        self.fc = linear(count * c.target_hidden_size, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        if c.markov_rank:
            self.markov_head = MarkovHead(c)
        if c.confidence_head:
            self.confidence_head = ConfidenceHead(c)
        if c.embedding == "mask_row":
            self.mask_row = nn.Parameter(torch.zeros(hidden))
        if c.embedding == "own":
            self.embed_tokens = nn.Embedding(c.vocab_size, hidden)

    def context(self, taps: Tensor) -> Tensor:
        """[B, S, taps * target hidden] -> [B, S, X], the same for every layer."""
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.hidden_norm(self.fc(taps))

    def block(self, anchors: Tensor, width: int, embed: Tensor) -> Tensor:
        """Inputs [B, N, W, X] of blocks that start with tokens `anchors` [B, N]."""
        table = self.embed_tokens.weight if self.config.embedding == "own" else embed
        mask = table[self.config.mask_token_id]
        mask = self.mask_row if self.config.embedding == "mask_row" else mask
        masks = mask.expand(*anchors.shape, width - 1, -1)
        return torch.cat([F.embedding(anchors, table)[..., None, :], masks], -2)

    def visible(self, layer: int, anchors: Tensor, width: int, context: int) -> Tensor:
        """[B, N * W, S + N * W]: what each slot of blocks at positions `anchors` [B, N] sees."""
        c, (batch, count) = self.config, anchors.shape
        window = None if c.windows is None else c.windows[layer]
        offsets = torch.arange(width, device=anchors.device)
        q = (anchors[..., None] + offsets)[..., None]  # [B, N, W, 1]
        rows, anchor = torch.arange(context, device=anchors.device), anchors[..., None, None]
        seen = (rows < anchor).expand(batch, count, width, context)
        within = torch.ones(width, width, dtype=torch.bool, device=anchors.device)
        if window is not None and c.window_from_anchor:
            seen = seen & (rows >= anchor - window)
        elif window is not None:
            seen = seen & (q - rows < window)
            within = (offsets[:, None] - offsets).abs() < window
        if c.causal is not None and c.causal[layer]:
            within = within & (offsets <= offsets[:, None])
        blocks = torch.eye(count, dtype=torch.bool, device=anchors.device)[:, None, :, None]
        blocks = (blocks & within[None, :, None, :]).expand(batch, *[-1] * 4).flatten(3)
        return torch.cat([seen, blocks], -1).flatten(1, 2)

    def forward(
        self, taps: Tensor, anchors: Tensor, positions: Tensor, num_drafts: int, embed: Tensor
    ) -> Tensor:
        """Hidden rows of the guesses, after the last norm.

        Args:
            taps: [B, S, taps * target hidden], of the tokens at positions 0..S-1.
            anchors: [B, N] tokens.
            positions: [B, N] the anchors' positions, at most S.
            num_drafts: g, as many as the block allows.
            embed: [V, X] the target's embedding.
        Returns:
            [B, N, g, X]; row j is of the guess for position + 1 + j.
        """
        c, width = self.config, self.config.width(num_drafts)
        context = self.context(taps)
        where = torch.arange(taps.shape[1], device=taps.device).expand(*taps.shape[:2])
        slots = positions[..., None] + torch.arange(width, device=taps.device)
        h, slots = self.block(anchors, width, embed).flatten(1, 2), slots.flatten(1)
        for index, layer in enumerate(self.layers):
            mask = self.visible(index, positions, width, taps.shape[1])
            h = layer(h, slots, context, where, mask)
        h = self.norm(h).unflatten(1, (-1, width))
        return h if c.anchor_predicts else h[..., 1:, :]

    def logits(self, hidden: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """[..., V] wide, from hidden [..., X] and the tokens before: the true ones in training."""
        logits = wide(F.linear(hidden, head))
        return logits + wide(self.markov_head(previous)) if self.config.markov_rank else logits

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[...] logits of the chance that the guess after `previous` is accepted."""
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1)
        return wide(self.confidence_head.proj(hidden))[..., 0]

    def draft(
        self,
        taps: Tensor,
        anchors: Tensor,
        positions: Tensor,
        num_drafts: int,
        embed: Tensor,
        head: Tensor,
        choose: Choose = greedy,
    ) -> Draft:
        """Guesses, left to right; `choose` picks tokens [B, N] from a slot's logits [B, N, V]."""
        hidden = self(taps, anchors, positions, num_drafts, embed)
        tokens, logits, previous = [], [], anchors
        for slot in range(num_drafts):
            logits.append(self.logits(hidden[..., slot, :], previous, head))
            previous = choose(logits[-1], slot)
            tokens.append(previous)
        chosen = torch.stack(tokens, -1)
        confidence = None
        if self.config.confidence_head:
            before = torch.cat([anchors[..., None], chosen[..., :-1]], -1)
            confidence = self.confidence(hidden, before)
        return Draft(chosen, torch.stack(logits, -2), confidence)
