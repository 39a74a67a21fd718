"""What the engine says about a request after a step."""

from dataclasses import dataclass

from tercel.core.sampling import TokenLogprobs
from tercel.runtime.sequence import FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """New tokens and text of one request; the last output of a request has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens; a stop token is among them, though its text is not in `text`."""
    text: str = ""
    """New text. It can trail the tokens: what may become a stop string is held back."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token where the request asked for them."""
    finish_reason: FinishReason | None = None
    """stop: a stop token or stop string; length: max_tokens or the context limit."""
    stop_reason: int | str | None = None
    """The stop string or stop token that the request named; None for the model's own."""
    error: str | None = None
    """What went wrong, with finish_reason error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens so far, a stop token included."""
    rounds: int = 0
    """Steps so far that verified guesses."""
    drafted_tokens: int = 0
    """Guesses verified in them."""
    accepted_tokens: int = 0
    """Guesses that became tokens."""
    forced_acceptance: bool = False
    """Whether guesses are accepted by decree: the text is then not the model's."""
