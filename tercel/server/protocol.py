"""What a request may contain, in OpenAI's form plus K3's own fields. Anything else is refused."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from tercel.config import SamplingParams
from tercel.errors import RequestError

INERT_FIELDS = frozenset(
    """user metadata store service_tier parallel_tool_calls safety_identifier prompt_cache_key
    prompt_cache_retention verbosity""".split()
)
"""Fields that change no answer here, accepted because clients send them."""

_FIXES = {
    "audio": "only text is served; remove it",
    "best_of": "only one answer per request is served; remove it",
    "continue_final_message": "set `partial: true` in the last assistant message instead",
    "enable_thinking": "use `thinking` with type enabled or disabled",
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "grammar": "use `response_format`",
    "guided_json": "use `response_format`",
    "modalities": "only text is served; remove it",
    "prediction": "predicted outputs are not built; remove it",
    "suffix": "insertion is not built; put the whole text into `prompt`",
    "web_search_options": "web search is not built; remove it",
}

MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
"""Of one request: each is a request of the engine."""

RequestT = TypeVar("RequestT", bound="GenerationRequest")


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Object):
    include_usage: bool | None = None
    """Whether a last chunk carries the usage."""


class Thinking(_Object):
    """How to think, K3's own form; what it says wins over the other fields."""

    type: Literal["enabled", "disabled"] = "enabled"
    keep: Literal["all"] | None = None
    """The reasoning of earlier turns is always kept."""
    effort: str | None = None


class ChatTemplateKwargs(_Object):
    thinking: bool | None = None


class Message(_Object):
    """The names of a message's fields. The chat encoding checks their values."""

    role: Any = None
    content: Any = None
    name: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    tool: Any = None
    tools: Any = None
    partial: Any = None
    refusal: Any = None
    audio: None = None
    annotations: Any = None
    function_call: None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that the chat encoding reads."""
        unread = {"refusal", "audio", "annotations", "function_call"}
        return self.model_dump(exclude_none=True, exclude=unread)


class GenerationRequest(_Object):
    """The fields that both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple.

        Raises:
            RequestError: it is neither a string nor a list of strings, or one is empty.
        """
        if self.stop is None:
            return ()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise RequestError("stop", "a string or a list of strings is needed")
        if "" in stops:
            raise RequestError("stop", "an empty string would stop every request; remove it")
        return tuple(stops)

    def sampling_params(self, **values: Any) -> SamplingParams:
        """Sampling parameters of this request; `values` of None are left at their defaults.

        Raises:
            RequestError: a value outside its range.
        """
        if self.n not in (None, 1):
            raise RequestError("n", f"{self.n} answers are not built; use 1 and send more requests")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "it needs `stream: true`; remove it")
        shared = (
            "min_tokens temperature top_p min_p presence_penalty frequency_penalty "
            "repetition_penalty ignore_eos seed"
        )
        values |= {name: getattr(self, name) for name in shared.split()}
        # Other servers spell "keep all" as -1.
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        values["logit_bias"] = _token_keys(self.logit_bias)
        values["stop_token_ids"] = tuple(self.stop_token_ids or ())
        return SamplingParams(**{key: val for key, val in values.items() if val is not None})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message]
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    """Rendered into the prompt; no grammar enforces it."""
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    def num_logprobs(self) -> int | None:
        """Best tokens to report per token; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "it needs `logprobs: true`")
        best = self.top_logprobs or 0
        if not 0 <= best <= MAX_LOGPROBS:
            raise RequestError("top_logprobs", f"{best} is outside 0 .. {MAX_LOGPROBS}")
        return best if self.logprobs else None

    def max_output(self) -> int | None:
        """Tokens to generate at most: the newer of the two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def thinks(self) -> bool:
        """Whether the answer starts with thinking; `thinking` wins over the template's keyword."""
        if self.thinking is not None:
            return self.thinking.type == "enabled"
        keyword = self.chat_template_kwargs and self.chat_template_kwargs.thinking
        return keyword is not False

    def effort(self) -> str:
        """The thinking effort; `thinking` wins over `reasoning_effort`, and max is the default."""
        explicit = self.thinking and self.thinking.effort
        return explicit or self.reasoning_effort or "max"


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as one list.

        Raises:
            RequestError: it is none of the four forms, empty, or too many.
        """
        prompts = self.prompt
        if isinstance(prompts, str) or (isinstance(prompts, list) and _are(prompts, int)):
            prompts = [prompts]
        if not isinstance(prompts, list):
            raise RequestError("prompt", f"{type(prompts).__name__} is not text or token ids")
        if _are(prompts, str) or all(isinstance(p, list) and _are(p, int) for p in prompts):
            if len(prompts) > MAX_PROMPTS:
                raise RequestError(
                    "prompt", f"{len(prompts):,} prompts are more than {MAX_PROMPTS}; send fewer"
                )
            if all(prompts) and prompts:
                return prompts
            raise RequestError("prompt", "it is empty; send at least one token")
        raise RequestError(
            "prompt", "text, a list of texts, token ids or a list of lists of token ids is needed"
        )


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A request from the bytes of its body.

    Raises:
        RequestError: malformed JSON or UTF-8, an unknown field, or a value of the wrong type.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError("body", f"it is not JSON in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise RequestError("body", "a JSON object is needed")
    values = {name: value for name, value in values.items() if name not in INERT_FIELDS}
    for name in values:
        if name not in kind.model_fields:
            raise RequestError(name, f"unknown field; {_fix(name, kind)}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error) from error


def _fix(name: str, kind: type[BaseModel]) -> str:
    if name in _FIXES:
        return _FIXES[name]
    close = difflib.get_close_matches(name, kind.model_fields, n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"


def _first_problem(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False)[0]
    field = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
    ).removeprefix(".")
    match problem["type"]:
        case "extra_forbidden":
            return RequestError(field, "unknown field; remove it")
        case "missing":
            return RequestError(field, "it is required; add it")
    # The value itself can be a whole conversation.
    found = repr(problem["input"])
    found = found if len(found) <= 80 else f"{found[:80]}..."
    return RequestError(field, f"{problem['msg'].lower()}, found {found}")


def _token_keys(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if not token.isascii() or not token.isdigit():
            raise RequestError("logit_bias", f"{token!r} is not a token id")
    return {int(token): value for token, value in bias.items()}


def _are(values: list[Any], kind: type) -> bool:
    """Whether a list has only values of this very type, so that a boolean is no number."""
    return bool(values) and all(type(value) is kind for value in values)
