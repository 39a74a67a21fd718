"""One request while it is served: its tokens, how far the caches hold them, and why it ended."""

from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import Literal

from tercel.config import SamplingParams
from tercel.core.sampling import RowSampling
from tercel.errors import RequestError
from tercel.runtime.matcher import Matcher
from tercel.runtime.proposals import DraftState

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Limits:
    """What a request has to stay within."""

    max_model_len: int
    """Prompt plus output, in tokens."""
    vocab_size: int

    def check(self, prompt_ids: Tokens[int], params: SamplingParams) -> None:
        """Raises RequestError naming the field that breaks a limit."""
        if not prompt_ids:
            raise RequestError("prompt", "it has no tokens; send at least one")
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                "prompt",
                f"{len(prompt_ids)} tokens leave no room for an answer within the context limit "
                f"of {self.max_model_len} tokens; shorten it to {self.max_model_len - 1}",
            )
        for field, tokens in (
            ("prompt", prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in tokens:
                if not 0 <= token < self.vocab_size:
                    raise RequestError(
                        field,
                        f"token {token} is outside the vocabulary, 0 .. {self.vocab_size - 1}",
                    )


class Sequence:
    """The mutable state of one request. The scheduler is its only writer."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Tokens[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        stop_ids: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
    ) -> None:
        """`params.seed` is set; `stop_ids` are the model's own stop tokens; `matcher` says what a
        grammar allows next."""
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.num_computed = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The stop token or stop string, where the request asked for it."""
        self._max_tokens = min(params.max_tokens, max_model_len - len(prompt_ids))
        own = frozenset() if params.ignore_eos else stop_ids
        self._stop_ids = own.union(params.stop_token_ids)
        self.drafting = DraftState()
        self.pending = 0
        """Accepted drafts of the last step, which the KDA state lacks still."""
        self._history = _history(prompt_ids, params)
        self._matcher = matcher
        self._sampling = _constant_sampling(params)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that the caches do not hold yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether one known token is missing from the caches: the last one drawn."""
        return self.num_computed > 0 and self.num_uncomputed == 1

    def append(self, token: int) -> None:
        """Adds a drawn token and ends the sequence if it is the last one."""
        self.token_ids.append(token)
        if self._history is not None:
            self._history[token] += 1
        if self._matcher is not None:
            self._matcher.advance(token)
        if token in self._stop_ids and self.num_output_tokens > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif self.num_output_tokens >= self._max_tokens:
            self.finish_reason = "length"

    @property
    def num_remaining(self) -> int:
        """Tokens until the length limit."""
        return self._max_tokens - self.num_output_tokens

    def sampling(self) -> RowSampling:
        """How the next token is drawn."""
        return self._sampling_after(self.num_output_tokens, self._history)

    def sampling_of(self, drafts: Tokens[int]) -> tuple[tuple[int, ...], tuple[RowSampling, ...]]:
        """(the drafts that are possible at all, how the token after each is drawn; empty where
        that is as `sampling` says). A draft that the grammar does not allow ends them."""
        if self._history is None and self._matcher is None and not self._is_short:
            return tuple(drafts), ()
        history = None if self._history is None else self._history.copy()
        kept: list[int] = []
        samplings = []
        for draft in drafts:
            if self._matcher is not None and not self._matcher.allows(draft):
                break
            kept.append(draft)
            if history is not None:
                history[draft] += 1
            if self._matcher is not None:
                self._matcher.advance(draft)
            samplings.append(self._sampling_after(self.num_output_tokens + len(kept), history))
        if self._matcher is not None:
            self._matcher.roll_back(len(kept))
        return tuple(kept), tuple(samplings)

    @property
    def _is_short(self) -> bool:
        """Whether stop tokens are barred from the next token."""
        return self.num_output_tokens < self.params.min_tokens

    def _sampling_after(self, num_output: int, history: Counter[int] | None) -> RowSampling:
        """Of the token after so many of the output."""
        sampling = self._sampling
        if history is not None:
            sampling = replace(sampling, history=tuple(history.items()))
        if num_output < self.params.min_tokens:
            banned = dict.fromkeys(sorted(self._stop_ids), float("-inf"))
            sampling = replace(sampling, bias=tuple((dict(sampling.bias) | banned).items()))
        if self._matcher is not None:
            sampling = replace(sampling, allowed=self._matcher.mask())
        return sampling


def _history(prompt_ids: Tokens[int], params: SamplingParams) -> Counter[int] | None:
    """Occurrences in the output of the tokens that penalties read; None without penalties.

    A prompt token counts zero times: only the repetition penalty sees it.
    """
    if params.repetition_penalty != 1:
        return Counter(dict.fromkeys(prompt_ids, 0))
    return Counter() if params.presence_penalty or params.frequency_penalty else None


def _constant_sampling(params: SamplingParams) -> RowSampling:
    if params.seed is None:
        raise ValueError("a sequence needs a seed")
    return RowSampling(
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=tuple(params.logit_bias.items()),
        logprobs=params.logprobs,
    )
