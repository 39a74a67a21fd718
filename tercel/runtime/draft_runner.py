"""One rank's drafter at work: context of every token that the target runs, then guesses."""

import torch

from tercel.core.cache import DrafterCache
from tercel.core.drafter import TapStream
from tercel.core.drafting import Block, DraftSampling, Taps
from tercel.core.inputs import StepInputs
from tercel.core.sampling import Draws
from tercel.runtime.verdict import Drafted, Verdict
from tercel.targets.drafters import Drafter


class TapBuffer:
    """Where the target leaves what a drafter reads, at addresses that stay. The rows of one token
    stand together, so that they are its features without a copy."""

    def __init__(
        self, layers: tuple[int, ...], stream: TapStream, max_tokens: int, like: torch.Tensor
    ) -> None:
        """`like` [.., N] is a row of activations."""
        self._layers, self._stream = layers, stream
        self._rows = like.new_zeros(max_tokens, len(layers), like.shape[-1])

    def of(self, num_tokens: int) -> Taps:
        """Of a step of so many tokens."""
        return Taps(self._layers, self._rows[:num_tokens].transpose(0, 1), self._stream)


class DraftRunner:
    """Owns the drafter's context pages and, per slot, what the latest guesses were drawn from."""

    def __init__(
        self,
        taps: TapBuffer,
        drafter: Drafter | None,
        cache: DrafterCache,
        *,
        logits: torch.Tensor | None,
    ) -> None:
        """
        Args:
            drafter: None on the pipeline stages that only capture taps.
            logits: [slots, drafts, vocabulary of this rank] f32, for acceptance rules that read
                what guesses were drawn from.
        """
        self.taps = taps
        self._drafter = drafter
        self._cache = cache
        self._logits = logits

    def clear(self, pages: torch.Tensor) -> None:
        """Zeroes pages that a request has just been given."""
        self._cache.pages.index_fill_(1, pages, 0)

    def write_context(self, taps: Taps, inputs: StepInputs) -> None:
        """Of every token of the step, rejected drafts too: they lie past the request's end, and
        are written again before its end gets there."""
        if self._drafter is None:
            return
        features = taps.rows.transpose(0, 1).flatten(1)
        self._drafter.write_context(features, inputs.positions, inputs.slot_mapping, self._cache)

    def proposed(self, inputs: StepInputs) -> torch.Tensor | None:
        """[R * drafts, V] what the drafts of the step's verify rows were drawn from."""
        if self._logits is None or inputs.verify is None or inputs.verify.width == 1:
            return None
        return self._logits[inputs.verify.slots, : inputs.verify.width - 1].flatten(0, 1)

    def draft(self, inputs: StepInputs, verdict: Verdict, num_drafts: int) -> Drafted | None:
        """Guesses for every request that samples; their anchors are the verdict's last tokens."""
        draws = inputs.draws
        if self._drafter is None or draws is None or not num_drafts:
            return None
        lengths = draws.anchors + verdict.accepted + 1
        block = Block(verdict.tokens[:, -1], lengths, draws.block_table, num_drafts)
        greedy = draws.kind is Draws.GREEDY
        sampling = DraftSampling(draws.temperature, draws.seeds, greedy=greedy)
        tokens, logits, confidence = self._drafter.draft(block, sampling, self._cache)
        if self._logits is not None:
            self._logits[draws.slots, :num_drafts] = logits.view(*tokens.shape, -1)
        return Drafted(tokens, confidence)
