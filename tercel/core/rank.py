"""One rank's place in a layout: which part of the model it runs."""

from dataclasses import dataclass
from functools import cached_property

from tercel.core.layout import Axis, Layout
from tercel.core.model import ModelConfig


@dataclass(frozen=True)
class ExpertPart:
    """Some of a rank's experts at some of their width: what one sum is taken of."""

    first_expert: int
    """Of the whole model."""
    experts: slice
    """Of this rank's."""
    width: tuple[int, int]
    """(index, count) of equal parts of this rank's width."""


@dataclass(frozen=True)
class Rank:
    layout: Layout
    rank: int
    model: ModelConfig
    sums: Layout | None = None
    """The layout whose sums are reproduced; None: this one."""

    @property
    def layers(self) -> range:
        """The layers of this rank's pipeline stage."""
        return self.layout.stage_layers(self.rank, self.model.num_hidden_layers)

    @property
    def is_first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the head is here."""
        return self.layers.stop == self.model.num_hidden_layers

    @property
    def first_token_id(self) -> int:
        """The first row of the embedding that this rank holds."""
        return self.layout.local_range(Axis.VOCAB, self.rank, self.model.vocab_size).start

    @property
    def num_sum_parts(self) -> int:
        """Parts that this rank's share of a sum is taken in."""
        return 1 if self.sums is None else self.sums.tp // self.layout.tp

    @cached_property
    def expert_parts(self) -> tuple[ExpertPart, ...]:
        """This rank's routed experts, as the sum over ranks divides them."""
        sums, total = self.sums or self.layout, self.model.num_experts
        held = self.layout.local_range(Axis.EXPERTS, self.rank, total)
        index, count = self.layout.part(Axis.EXPERT_WIDTH, self.rank)
        parts = []
        for rank in self.layout.sum_ranks(self.rank, sums):
            experts = sums.local_range(Axis.EXPERTS, rank, total)
            its_index, its_count = sums.part(Axis.EXPERT_WIDTH, rank)
            each = its_count // count
            local = slice(experts.start - held.start, experts.stop - held.start)
            parts.append(ExpertPart(experts.start, local, (its_index - index * each, each)))
        return tuple(parts)
