"""A drafter from a checkpoint of its own, of any published format, over bound sites.

Sites are bound twice, for as few rows as gemv serves and for any number, as those of a target are
per step class. Both are recorded on meta tensors first: a kernel that is not certified here, or
does not serve the drafter's sizes, gives way to the portable form. The log says why, and each of
its calls is counted. A graph's builds all run before its capture (tercel.runtime.graphs).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tercel.blocks import drafter as blocks
from tercel.blocks.sites import SiteTable
from tercel.core.cache import DrafterCache
from tercel.core.drafter import TapStream
from tercel.core.drafting import Block, DraftSampling
from tercel.core.parameters import on_meta
from tercel.ops.gemm.gemv.contract import MAX_ROWS
from tercel.targets.binding import Bound, bind_sites, counted_table
from tercel.targets.drafters import DrafterPlan
from tercel.targets.recording import Recorder, RecordingGroup, Refused

_LOG = logging.getLogger(__name__)
COUNTERS = 256
"""More than the heads of keys and values that K3's drafters have in all layers."""
PAGE = 64
"""Tokens of a page while recording; no kernel depends on it."""


@dataclass(frozen=True)
class BlockDrafter:
    """See tercel.targets.drafters.Drafter."""

    plan: DrafterPlan
    few: SiteTable
    """Sites of at most MAX_ROWS rows."""
    many: SiteTable
    counters: torch.Tensor
    """As of context_kv; one step after the other uses them."""

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
        k = self._sites(len(taps))
        given = (taps, positions, slot_mapping, cache, self.counters)
        blocks.write_context(k, p.group, p.weights, p.config, *given)

    def draft(
        self, block: Block, sampling: DraftSampling, cache: DrafterCache
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        p = self.plan
        k = self._sites(len(block.anchors) * p.config.width(block.num_drafts))
        hidden = blocks.run_block(k, p.group, p.weights, p.config, p.embed, block, cache)
        tokens, logits = blocks.draft(
            k, p.group, p.weights, hidden, p.head, block, sampling, p.board
        )
        if not p.config.confidence_head:
            return tokens, logits, None
        return tokens, logits, blocks.confidence(k, p.weights, hidden, block, tokens)

    def _sites(self, rows: int) -> SiteTable:
        return self.few if rows <= MAX_ROWS else self.many


def create(plan: DrafterPlan) -> BlockDrafter:
    """Binds the sites of `plan`."""
    few, many = bind_drafter(plan, rows=1), bind_drafter(plan, rows=MAX_ROWS + 1)
    for item in few.values():
        _LOG.info("drafter.%s: %s %s", item.site, item.op.name, item.reason)
        more = many[item.site]
        if more.op is not item.op:
            text = "drafter.%s above %d rows: %s %s"
            _LOG.info(text, item.site, MAX_ROWS, more.op.name, more.reason)
    few_table, many_table = (counted_table(x, plan.counts, prefix="drafter.") for x in (few, many))
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=plan.embed.device)
    return BlockDrafter(plan, few_table, many_table, counters)


def bind_drafter(plan: DrafterPlan, *, rows: int) -> Mapping[str, Bound]:
    """What stands behind each site in blocks and context of at least so many rows: the first kernel
    that is certified and serves the drafter's sizes, else the portable form."""
    refused: dict[tuple[str, str, str], str] = {}
    wanted = blocks.FEW_ROWS if rows <= MAX_ROWS else blocks.SITES
    while True:
        bound = bind_sites(plan.row, plan.arch, wanted, refused=refused)
        try:
            sizes = {"requests": rows, "tokens": rows, "num_drafts": plan.config.max_drafts}
            record(plan, Recorder(bound), **sizes, context=2 * PAGE)
            return bound
        except Refused as refusal:
            refused[refusal.key] = refusal.reason


def record(
    plan: DrafterPlan,
    recorder: Recorder,
    *,
    requests: int,
    tokens: int,
    num_drafts: int,
    context: int,
) -> None:
    """The drafting of a step through `recorder`, on meta tensors: the context rows of so many
    tokens, then a block of guesses of each request, behind a context of so many."""
    c, group = plan.config, RecordingGroup(plan.group.rank, plan.group.world_size, recorder)
    w, embed, head = (on_meta(x) for x in (plan.weights, plan.embed, plan.head))
    with torch.device("meta"):
        each, rows = (torch.empty(x, dtype=torch.int64) for x in (requests, tokens))
        table = torch.empty(requests, -(-context // PAGE), dtype=torch.int64)
        entry = c.attention.entry_shape(group.world_size)
        pages = torch.empty(c.num_hidden_layers, 4, PAGE, *entry, dtype=embed.dtype)
        taps = torch.empty(tokens, len(c.taps) * embed.shape[1], dtype=embed.dtype)
        cache, block = DrafterCache(pages), Block(each, each, table, num_drafts)
        sampling = DraftSampling(torch.empty(requests), each, greedy=True)
        k = recorder.table
        blocks.write_context(k, group, w, c, taps, rows, rows, cache)
        hidden = blocks.run_block(k, group, w, c, embed, block, cache)
        drafts, _ = blocks.draft(k, group, w, hidden, head, block, sampling)
        if c.confidence_head:
            blocks.confidence(k, w, hidden, block, drafts)
