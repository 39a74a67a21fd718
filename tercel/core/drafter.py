"""What a drafter's config.json says, whichever format it was published in.

A drafter is a small model that guesses a block of tokens from taps of the target's hidden rows;
tercel/reference/drafter.py says what it computes. The formats are read in drafter_formats.py.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from tercel.core.model import ModelConfig
from tercel.core.rope import Rope
from tercel.errors import ConfigError


class TapStream(StrEnum):
    """Which row "the output of a layer" is, where the target has attention residuals."""

    MIXTURE = "mixture"
    """What the next layer's norm reads: a selection over snapshots and the prefix sum."""
    PREFIX = "prefix"
    """The running sum of sublayer outputs."""


class Embedding(StrEnum):
    """Whose rows enter a block. Read from the tensors that there are, not from the config."""

    TARGET = "target"
    MASK_ROW = "mask_row"
    """The target's, but for the mask token's, which was trained."""
    OWN = "own"
    """A table of the drafter's."""


@dataclass(frozen=True)
class GqaShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def entry_shape(self, tp: int) -> tuple[int, ...]:
        """What one of `tp` ranks caches per token and layer: keys, then values, of its heads."""
        return 2, self.num_kv_heads // tp, self.head_dim


@dataclass(frozen=True)
class MlaShape:
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def entry_shape(self, tp: int) -> tuple[int, ...]:
        """What every rank caches per token and layer: normed latent, then the turned key part."""
        return (self.latent_dim,)


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter; layer indices are 0-based."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention: GqaShape | MlaShape
    rope: Rope
    windows: tuple[int | None, ...]
    """Per layer: tokens that a slot sees; None: all."""
    window_from_anchor: bool
    """A window is the tokens before the anchor, the same for every slot (speculators); otherwise
    those less than a window away from the slot (transformers)."""
    causal: tuple[bool, ...]
    """Per layer: whether a slot sees only the earlier slots of its block and itself."""
    target_hidden_size: int
    target_num_layers: int | None
    """None: the config does not say."""
    taps: tuple[int, ...]
    """Layers of the target whose output is tapped, ascending."""
    tap_stream: TapStream
    fc_norm: bool
    """Whether each tap is normed before the projection."""
    block_size: int
    """Slots of a block, as trained."""
    anchor_predicts: bool
    """Slot j predicts position anchor + 1 + j; otherwise anchor + j, and slot 0 nothing."""
    mask_token_id: int
    markov_rank: int
    """0: no Markov head."""
    confidence_head: bool
    confidence_with_markov: bool
    confidence_temperatures: tuple[float, ...] = ()
    """Calibration of the confidence of each slot; empty: none."""
    target_fingerprint: str | None = None
    """Of the checkpoint that it was trained for (tercel/weights/fingerprint.py)."""

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.anchor_predicts else self.block_size - 1

    def width(self, num_drafts: int) -> int:
        """Slots that `num_drafts` guesses take; raises ConfigError where the block is too small."""
        if not 1 <= num_drafts <= self.max_drafts:
            raise ConfigError(
                f"drafts per step: {num_drafts}, the drafter was trained for 1..{self.max_drafts}"
            )
        return num_drafts if self.anchor_predicts else num_drafts + 1

    @property
    def softmax_scale(self) -> float:
        """MLA folds YaRN's sharpening into it: not all of its channels turn."""
        shape = self.attention
        if isinstance(shape, GqaShape):
            return 1 / math.sqrt(shape.head_dim)
        key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        return self.rope.sharpening**2 / math.sqrt(key_dim)

    def check_target(self, model: ModelConfig) -> None:
        """Raises ConfigError listing all that keeps this drafter from drafting for `model`."""
        pairs = (
            ("target_hidden_size", self.target_hidden_size, model.hidden_size),
            ("hidden_size", self.hidden_size, model.hidden_size),
            ("vocab_size", self.vocab_size, model.vocab_size),
            ("target layers", self.target_num_layers, model.num_hidden_layers),
        )
        problems = [
            f"{name} is {ours}, the model's is {theirs}"
            for name, ours, theirs in pairs
            if ours is not None and ours != theirs
        ]
        if self.taps[-1] >= model.num_hidden_layers:
            problems.append(
                f"tap {self.taps[-1]} is outside the model's {model.num_hidden_layers} layers"
            )
        if problems:
            raise ConfigError("drafter: trained for another model: " + "; ".join(problems))
