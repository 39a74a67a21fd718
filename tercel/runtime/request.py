"""The engine's side of one request: tokens to text, the end of it, and when things happened."""

from tercel.core.sampling import TokenLogprobs
from tercel.runtime.metrics import RequestClock
from tercel.runtime.output_text import OutputText
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.scheduler import Progress
from tercel.runtime.sequence import FinishReason, Sequence
from tercel.runtime.tokenizer import Tokenizer


class Request:
    """Turns what the scheduler reports about `sequence` into outputs."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        clock: RequestClock,
        *,
        forced_acceptance: bool = False,
    ) -> None:
        """`forced_acceptance` is said in every output."""
        params = sequence.params
        self._forced_acceptance = forced_acceptance
        self.sequence = sequence
        self.clock = clock
        self._text = OutputText(tokenizer, params.stop, params.min_tokens)
        self._num_tokens = 0

    def advance(self, progress: Progress) -> RequestOutput:
        """The output after a step; a stop string in its text ends the request here."""
        reason = self.sequence.finish_reason
        num_visible = len(progress.tokens) - (reason == "stop")
        num_used, pieces = len(progress.tokens), []
        for count, token in enumerate(progress.tokens[:num_visible], start=1):
            pieces.append(self._text.push(token))
            if self._text.stopped_by is not None:
                num_used, reason = count, "stop"
                break
        self._num_tokens += num_used
        tokens, logprobs = progress.tokens[:num_used], progress.logprobs[:num_used]
        return self._output(reason, tokens, logprobs, "".join(pieces))

    def abort(self) -> RequestOutput:
        """The last output of a request that is ended from outside."""
        return self._output("abort")

    def _output(
        self,
        reason: FinishReason | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        text: str = "",
    ) -> RequestOutput:
        """An output of new tokens; at the end, with the text that was held back."""
        stopped_by = self._text.stopped_by
        return RequestOutput(
            self.sequence.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            text=text + self._text.finish() if reason else text,
            finish_reason=reason,
            stop_reason=self.sequence.stop_reason if stopped_by is None else stopped_by,
            error=self._error() if reason == "error" else None,
            prompt_tokens=self.sequence.num_prompt_tokens,
            completion_tokens=self._num_tokens,
            rounds=self.sequence.drafting.rounds,
            drafted_tokens=self.sequence.drafting.drafted,
            accepted_tokens=self.sequence.drafting.accepted,
            forced_acceptance=self._forced_acceptance,
        )

    def _error(self) -> str:
        position = len(self.sequence.token_ids)
        return f"the model's logits for token {position} are not finite; other requests go on"
