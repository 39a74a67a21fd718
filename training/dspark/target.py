"""The frozen target: the reference with parts that run fast on a GPU, and what a drafter reads."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tercel.reference.drafter import Config as DrafterConfig
from tercel.reference.drafter import Taps
from tercel.reference.kimi_k3 import Config, recurrent_kda
from training.nano.evaluate import load, read_config
from training.nano.model import chunked_kda, training_model


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
        kda = chunked_kda if device.type == "cuda" else recurrent_kda
        self.model = load(training_model(self.config, 0, kda), directory).to(device)
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
