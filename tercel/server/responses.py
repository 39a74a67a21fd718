"""Answers in OpenAI's form. Fields that are UNSET are left out; None is written as null."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tercel.runtime.outputs import RequestOutput


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Guesses that became tokens; unset without a drafter."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    verify_rounds: int | UnsetType = UNSET
    """Steps that verified guesses."""
    forced_acceptance: bool | UnsetType = UNSET
    """True where guesses are accepted by decree: the text is not the model's."""


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def completion_details(
    outputs: Iterable[RequestOutput], reasoning_tokens: int = 0
) -> CompletionTokensDetails:
    """Of the latest outputs of one or more requests."""
    known = list(outputs)
    rounds = sum(output.rounds for output in known)
    is_forced = any(output.forced_acceptance for output in known)
    if not rounds and not is_forced:
        return CompletionTokensDetails(reasoning_tokens)
    accepted = sum(output.accepted_tokens for output in known)
    drafted = sum(output.drafted_tokens for output in known)
    forced = True if is_forced else UNSET
    return CompletionTokensDetails(reasoning_tokens, accepted, drafted - accepted, rounds, forced)


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    """Every generated token in order: thinking and control tokens too."""


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class FunctionDelta(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    delta: Delta
    index: int = 0
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    message: ChatMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Mapping[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    text: str
    index: int = 0
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class TextCompletion(Struct, frozen=True):
    """A whole completion or one chunk of it; OpenAI calls both by one name."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET


def to_json(answer: Struct) -> bytes:
    """The bytes of a response body or of an event's data."""
    return msgspec.json.encode(answer)
