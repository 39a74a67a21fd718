"""What one pipeline stage hands to the next: the residual stream, whole.

With attention residuals the stream is not one row per token but the prefix sum and every snapshot
taken so far: any later layer may select any of them. Drafters' taps travel with it.
"""

from dataclasses import dataclass

import torch

from tercel.core.drafter import TapStream
from tercel.core.group import Group
from tercel.core.rank import Rank


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


def send(
    world: Group, place: Rank, prefix: torch.Tensor, bank: torch.Tensor, taps: Taps | None
) -> None:
    """prefix [T, N] and bank [snapshots, T, N] to the same tensor rank of the next stage."""
    parts = _handed_over(place.layers.stop, place, bank, taps)
    world.send(torch.cat((prefix.unsqueeze(0), *parts)), place.rank + place.layout.tp)


def receive(world: Group, place: Rank, bank: torch.Tensor, taps: Taps | None) -> torch.Tensor:
    """The prefix sum [T, N] of the stage before; its snapshots and taps are written in place."""
    parts = _handed_over(place.layers.start, place, bank, taps)
    sizes = [1, *map(len, parts)]
    like = bank.new_empty(sum(sizes), *bank.shape[1:])
    prefix, *rows = torch.split(world.recv(like, place.rank - place.layout.tp), sizes)
    for part, received in zip(parts, rows, strict=True):
        part.copy_(received)
    return prefix[0]


def _handed_over(
    layer: int, place: Rank, bank: torch.Tensor, taps: Taps | None
) -> list[torch.Tensor]:
    """What there is besides the prefix sum before `layer`, as views."""
    block = place.model.attn_res_block_size
    taken = 0 if block is None else -(-layer // block)
    return [bank[:taken], *([] if taps is None else [taps.before(layer)])]
