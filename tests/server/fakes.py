"""An engine client that plays a script, and the outputs that scripts are made of."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tercel.config import SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.runtime.chat import Segment, encode
from tercel.runtime.chat.segments import END_OF_MESSAGE, close_tag, open_tag, text
from tercel.runtime.tokenizer import Detokenizer, Tokenizer, byte_tokens

TOKENIZER = Tokenizer(byte_tokens())

Script = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class FakeOutput:
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None


@dataclass
class FakeEngine:
    """Generates what `script` says about a prompt, a few tokens per output."""

    script: Script
    max_model_len: int = 4000
    tokens_per_output: int = 3
    delay_s: float = 0.0
    failure: Exception | None = None
    """Raised after the first output."""
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def start(self) -> None:
        await asyncio.sleep(self.delay_s)

    async def stats(self) -> Mapping[str, float]:
        if self.failure:
            raise self.failure
        return {"num_requests_running": 0, "num_requests_waiting": 0}

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)
        self.aborted.append(request_id)

    async def close(self) -> None:
        self.is_closed = True

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[FakeOutput]:
        self.params.append(params)
        self.prompts.append(list(prompt_ids))
        ids = list(self.script(prompt_ids))
        ends = len(ids) <= params.max_tokens
        ids = ids[: params.max_tokens]
        detokenizer = Detokenizer(TOKENIZER)
        for start in range(0, len(ids), self.tokens_per_output):
            await asyncio.sleep(self.delay_s)
            if start and self.failure:
                raise self.failure
            new = ids[start : start + self.tokens_per_output]
            done = start + len(new)
            is_last = done == len(ids)
            yield FakeOutput(
                token_ids=new,
                text=detokenizer.push(i for i in new if i not in TOKENIZER.stop_ids),
                logprobs=self._logprobs(new, params),
                finish_reason=("stop" if ends else "length") if is_last else None,
                prompt_tokens=len(prompt_ids),
                completion_tokens=done,
            )

    def _logprobs(
        self, ids: Sequence[int], params: SamplingParams
    ) -> Sequence[TokenLogprobs] | None:
        if params.logprobs is None:
            return None
        top = tuple((token, -1.0 - token) for token in range(97, 97 + params.logprobs))
        return [TokenLogprobs(token, -0.5, 1, top) for token in ids]


def says(segments: Sequence[Segment]) -> Script:
    """A script that always answers with these segments."""
    ids = encode(TOKENIZER, segments)
    return lambda prompt_ids: ids


def message(
    content: str, reasoning: str | None = "", calls: Sequence[tuple[str, dict[str, str]]] = ()
) -> list[Segment]:
    """An assistant message as a model writes it behind its generation prompt.

    `reasoning` of None: thinking is off. The arguments of `calls` are strings.
    """
    segments: list[Segment] = []
    if reasoning is not None:
        segments += [*text(reasoning), *close_tag("think"), *open_tag("response")]
    segments += [*text(content), *close_tag("response")]
    if calls:
        segments += open_tag("tools")
        for index, (name, arguments) in enumerate(calls, start=1):
            segments += open_tag("call", ("tool", name), ("index", str(index)))
            for key, value in arguments.items():
                segments += open_tag("argument", ("key", key), ("type", "string"))
                segments += [*text(value), *close_tag("argument")]
            segments += close_tag("call")
        segments += close_tag("tools")
    return [*segments, *close_tag("message"), END_OF_MESSAGE]
