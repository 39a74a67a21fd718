"""What one pipeline stage hands to the next: the residual stream, whole.

With attention residuals the stream is not one row per token but the prefix sum and every snapshot
taken so far: any later layer may select any of them. Drafters' taps travel with it.
"""

import torch

from tercel.core.drafting import Taps
from tercel.core.group import Group
from tercel.core.rank import Rank


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
