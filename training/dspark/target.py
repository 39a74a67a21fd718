"""The frozen target: the reference with parts that run fast on a GPU, and what a drafter reads."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tercel.ops._lib.delta_rule import Chunk, advance, pad_tokens, prepare, run_chunk
from tercel.reference.drafter import Config as DrafterConfig
from tercel.reference.drafter import Taps
from tercel.reference.kimi_k3 import Config
from training.nano.evaluate import load, read_config
from training.nano.model import training_model

CHUNK = 64
"""Tokens whose errors are solved for together."""


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`recurrent_kda` a chunk of tokens at a time, without gradients; nothing is compiled."""
    batch, length, heads, _ = k.shape
    whole = -(-length // CHUNK) * CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, D] -> [B * H, chunks, C, D]."""
        padded = pad_tokens(x.float().transpose(1, 2), whole)
        return padded.reshape(batch * heads, -1, CHUNK, x.shape[-1])

    prepared = prepare(*(chunks(x) for x in (q, k, v, g, beta.unsqueeze(-1))))
    state = v.new_zeros(batch * heads, v.shape[-1], k.shape[-1], dtype=torch.float32)
    outputs = []
    for index in range(whole // CHUNK):
        chunk = Chunk(*(x[:, index] for x in prepared))
        output, errors = run_chunk(chunk, state)
        advance(chunk, state, errors)
        outputs.append(output)
    joined = torch.cat(outputs, 1).view(batch, heads, whole, -1)
    return joined.transpose(1, 2)[:, :length].to(v.dtype)


class Seen(NamedTuple):
    """What one forward of the target over rows of tokens gives."""

    taps: Tensor
    """[B, L, taps * hidden]."""
    hidden: Tensor
    """[B, L, hidden] after the last norm: what the head reads."""


class Target(nn.Module):
    """A checkpoint of the K3 family; parameters fp32, products bf16 on a GPU."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        super().__init__()
        self.config: Config = read_config(directory)
        limits = json.loads((directory / "config.json").read_text())
        self.max_position_embeddings: int = limits.get("text_config", limits)[
            "max_position_embeddings"
        ]
        model = training_model(self.config, 0, chunked_kda)
        self.model = load(model, directory).to(device)
        self.model.requires_grad_(False)

    @property
    def embed(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight

    @torch.no_grad()
    def see(self, tokens: Tensor, drafter: DrafterConfig) -> Seen:
        """tokens [B, L]."""
        taps = Taps(drafter)
        hidden = self.model.model(tokens, taps)
        dtype = self.embed.dtype
        return Seen(taps.features().to(dtype), hidden.to(dtype))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] fp32."""
        return self.model.lm_head(hidden).float()
