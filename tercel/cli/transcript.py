"""One answer on the terminal as it comes: thinking dimmed and apart, then the answer."""

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from tercel.errors import EngineError
from tercel.runtime.chat import (
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from tercel.runtime.completions import ChatCompletion
from tercel.runtime.llm import ChatItem


class Transcript:
    """Prints answers, and times the last one."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._console = Console(quiet=is_silent, highlight=False, soft_wrap=True)
        self._channel: type | None = None
        self._start_s = 0.0
        self._first_s: float | None = None
        self._end_s = 0.0

    def show(self, items: Iterator[ChatItem]) -> ChatCompletion:
        """Prints the events; the completion that ends them.

        Raises:
            EngineError: the engine gave up the request.
        """
        self._channel, self._first_s = None, None
        self._start_s = time.perf_counter()
        for item in items:
            if self._first_s is None:
                self._first_s = time.perf_counter()
            if isinstance(item, ChatCompletion):
                self._end_s = time.perf_counter()
                self._console.print()
                if item.completion.error is not None:
                    raise EngineError(item.completion.error)
                return item
            self._print(item)
        raise AssertionError("a stream ends with its completion")

    def speed(self, completion: ChatCompletion) -> dict[str, float]:
        """Seconds to the first text, and tokens per second over the whole answer."""
        elapsed_s = self._end_s - self._start_s
        return {
            "ttft_s": (self._first_s or self._end_s) - self._start_s,
            "tokens_per_s": completion.completion.completion_tokens / elapsed_s,
        }

    def print_speed(self, completion: ChatCompletion) -> None:
        """One dim line below an answer."""
        speed = self.speed(completion)
        count = completion.completion.completion_tokens
        line = f"{count} tokens, {speed['tokens_per_s']:.1f} tokens/s, TTFT {speed['ttft_s']:.2f} s"
        self._console.print(line + "\n", style="dim", markup=False)

    def _print(self, item: ChatItem) -> None:
        match item:
            case ReasoningDelta(text):
                self._enter(ReasoningDelta, "thinking: ", "dim italic")
                self._write(text, "dim italic")
            case ContentDelta(text):
                self._enter(ContentDelta, "answer: ", "bold")
                self._write(text)
            case ToolCallStart(_, _, name):
                self._channel = ToolCallStart
                self._write(f"\ncall: {name} ", "cyan")
            case ToolArgumentsDelta(_, text):
                self._write(text, "cyan")

    def _enter(self, channel: type, label: str, style: str) -> None:
        if self._channel is not channel:
            gap = "" if self._channel is None else "\n"
            self._channel = channel
            self._write(gap + label, style)

    def _write(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, end="", markup=False)


def usage_of(completion: ChatCompletion) -> dict[str, Any]:
    """Why the answer ended, and its tokens."""
    return {
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.completion.prompt_tokens,
        "completion_tokens": completion.completion.completion_tokens,
        "reasoning_tokens": completion.reasoning_tokens,
    }
