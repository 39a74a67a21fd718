"""Who drafts for a target, by the module that its row names. Each has `create(DrafterPlan)`."""

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tercel.core.arch import Arch
from tercel.core.cache import DrafterCache
from tercel.core.drafter import DrafterConfig, TapStream
from tercel.core.drafter_parameters import DrafterWeights
from tercel.core.drafting import Block, DraftSampling
from tercel.core.group import Group
from tercel.targets.table import TargetRow


class Drafter(Protocol):
    """What the runtime asks of a drafter on one rank."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose output it reads, ascending."""
        ...

    @property
    def tap_stream(self) -> TapStream: ...

    def write_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: DrafterCache,
    ) -> None:
        """Keeps what it needs of tokens that the target ran: taps [T, taps * N]."""
        ...

    def draft(
        self, block: Block, sampling: DraftSampling, cache: DrafterCache
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(tokens [R, g], the logits that they were drawn from [R * g, V] f32 of this rank,
        confidence [R, g] logits or None)."""
        ...


@dataclass(frozen=True)
class DrafterPlan:
    """All that a drafter of one rank is made of."""

    row: TargetRow
    arch: Arch
    config: DrafterConfig
    weights: DrafterWeights
    embed: torch.Tensor
    """[V, N] this rank's part of the target's embedding: its memory where the rank holds it."""
    head: torch.Tensor
    """[V, N] this rank's part of the target's head."""
    group: Group
    counts: Counter[str]
    """Calls per site, op and implementation."""
    board: torch.Tensor | None = None
    """As of op markov_chain; one step after the other uses it."""


def create_drafter(plan: DrafterPlan) -> Drafter:
    """The drafter that the target's row names: its own, or one that any target may have."""
    module = importlib.import_module(f"tercel.targets.drafters.{plan.row.drafter}")
    create: Callable[[DrafterPlan], Drafter] = module.create
    return create(plan)
