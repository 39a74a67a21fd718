"""What target, runtime and drafter hand to each other when a step drafts."""

from dataclasses import dataclass

import torch

from tercel.core.drafter import TapStream


@dataclass(frozen=True)
class Taps:
    """Rows that drafters read: the stream after some layers, before the norm of what follows."""

    layers: tuple[int, ...]
    """Ascending."""
    rows: torch.Tensor
    """[len(layers), T, N], written by the stages that pass them; whole on the last one."""
    stream: TapStream = TapStream.MIXTURE
    """Which row after a layer is kept."""

    def capture(self, layer: int, mixture: torch.Tensor, prefix: torch.Tensor) -> None:
        """Keeps the row after `layer` where it is one of `layers`: what the next layer's norm
        reads, or the sum of sublayer outputs."""
        if layer in self.layers:
            row = mixture if self.stream is TapStream.MIXTURE else prefix
            self.rows[self.layers.index(layer)].copy_(row)

    def before(self, layer: int) -> torch.Tensor:
        """The rows that are written when `layer` is about to start, the one before it aside: its
        tap is the selection that `layer` starts with."""
        return self.rows[: sum(tapped < layer - 1 for tapped in self.layers)]


@dataclass(frozen=True)
class Block:
    """What is drafted in a step, one block per request."""

    anchors: torch.Tensor
    """[R] i64 the last known token of each request, which the target has not run."""
    context_lens: torch.Tensor
    """[R] i64 tokens that the caches hold: the anchors' positions. Padding requests have 0."""
    block_table: torch.Tensor
    """[R, pages] i64."""
    num_drafts: int
    """Of every request."""


@dataclass(frozen=True)
class DraftSampling:
    """How drafts are drawn; the temperature is the request's own."""

    temperature: torch.Tensor
    """[R] f32."""
    seeds: torch.Tensor
    """[R] i64."""
    greedy: bool
    """Whether every temperature is 0."""
