"""An engine client that plays a script, and the outputs that scripts are made of."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from tercel.config import SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.runtime.chat import Segment, encode
from tercel.runtime.chat.segments import END_OF_MESSAGE, close_tag, open_tag, text
from tercel.runtime.metrics import Counters, Stats, Usage
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.sequence import Limits
from tercel.runtime.tokenizer import Detokenizer, Tokenizer, byte_tokens

TOKENIZER = Tokenizer(byte_tokens())

LIMITS = Limits(4000, TOKENIZER.vocab_size)

Script = Callable[[Sequence[int]], Sequence[int]]


@dataclass
class FakeEngine:
    """Generates what `script` says about a prompt, a few tokens per output."""

    script: Script
    limits: Limits = LIMITS
    tokens_per_output: int = 3
    delay_s: float = 0.0
    failure: Exception | None = None
    """Raised after the first output."""
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        await asyncio.sleep(self.delay_s)

    async def stats(self) -> Stats:
        if self.failure:
            raise self.failure
        usage = Usage(
            num_running=len(self.running),
            num_waiting=0,
            max_running=4,
            num_pages=8,
            num_used_pages=2,
            num_slots=4,
            num_used_slots=1,
            num_preemptions=0,
        )
        return Stats(usage, self.counters, {"head": 3})

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.remove(request_id)
            self.aborted.append(request_id)

    async def lost(self) -> None:
        await self.closed.wait()

    async def close(self) -> None:
        self.closed.set()

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        self.limits.check(prompt_ids, params)
        return self._stream(request_id, prompt_ids, params)

    async def _stream(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        self.running.add(request_id)
        try:
            async for output in self._outputs(request_id, prompt_ids, params):
                if output.finish_reason is not None:
                    self.running.discard(request_id)
                yield output
        finally:
            if request_id in self.running:
                await self.abort(request_id)

    async def _outputs(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
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
            if request_id not in self.running:
                yield RequestOutput(request_id, finish_reason="abort")
                return
            if is_last:
                self.counters.num_finished["stop"] = 1
            yield RequestOutput(
                request_id,
                token_ids=tuple(new),
                text=detokenizer.push(i for i in new if i not in TOKENIZER.stop_ids),
                logprobs=self._logprobs(new, params),
                finish_reason=("stop" if ends else "length") if is_last else None,
                prompt_tokens=len(prompt_ids),
                completion_tokens=done,
            )

    def _logprobs(self, ids: Sequence[int], params: SamplingParams) -> tuple[TokenLogprobs, ...]:
        if params.logprobs is None:
            return ()
        top = tuple((token, -1.0 - token) for token in range(97, 97 + params.logprobs))
        return tuple(TokenLogprobs(token, -0.5, 1, top) for token in ids)


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
