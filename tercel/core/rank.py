"""One rank's place in a layout: which part of the model it runs."""

from dataclasses import dataclass

from tercel.core.layout import Axis, Layout
from tercel.core.model import ModelConfig


@dataclass(frozen=True)
class Rank:
    layout: Layout
    rank: int
    model: ModelConfig

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
    def first_expert(self) -> int:
        """The first routed expert that this rank holds."""
        return self.layout.local_range(Axis.EXPERTS, self.rank, self.model.num_experts).start
