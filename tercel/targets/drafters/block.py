"""A drafter from a checkpoint of its own, of any published format, over bound sites."""

from dataclasses import dataclass

import torch

from tercel.blocks import drafter as blocks
from tercel.blocks.sites import SiteTable
from tercel.core.cache import DrafterCache
from tercel.core.drafter import TapStream
from tercel.core.drafting import Block, DraftSampling
from tercel.targets.binding import bind_sites, counted_table
from tercel.targets.drafters import DrafterPlan


@dataclass(frozen=True)
class BlockDrafter:
    """See tercel.targets.drafters.Drafter."""

    plan: DrafterPlan
    table: SiteTable
    counters: torch.Tensor
    """As of markov_chain; one step after the other uses them."""

    @property
    def taps(self) -> tuple[int, ...]:
        return self.plan.config.taps

    @property
    def tap_stream(self) -> TapStream:
        return self.plan.config.tap_stream

    def write_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: DrafterCache,
    ) -> None:
        p = self.plan
        blocks.write_context(
            self.table, p.group, p.weights, p.config, taps, positions, slot_mapping, cache
        )

    def draft(
        self, block: Block, sampling: DraftSampling, cache: DrafterCache
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        p = self.plan
        hidden = blocks.run_block(self.table, p.group, p.weights, p.config, p.embed, block, cache)
        tokens, logits = blocks.draft(
            self.table, p.group, p.weights, hidden, p.head, block, sampling, self.counters
        )
        if not p.config.confidence_head:
            return tokens, logits, None
        return tokens, logits, blocks.confidence(self.table, p.weights, hidden, block, tokens)


def create(plan: DrafterPlan) -> BlockDrafter:
    """A site without a kernel that is certified here runs its portable form, which the calls
    counted show."""
    bound = bind_sites(plan.row, plan.arch, blocks.SITES)
    counters = torch.zeros(plan.config.block_size, dtype=torch.int32, device=plan.embed.device)
    return BlockDrafter(plan, counted_table(bound, plan.counts, prefix="drafter."), counters)
