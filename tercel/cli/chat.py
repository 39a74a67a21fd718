"""`tercel chat`: a conversation in the terminal, or one turn per line of a pipe."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel.cli import standard_input
from tercel.cli.options import Json, dataclass_options
from tercel.cli.ranks import serve_as_rank
from tercel.config import EngineConfig, SamplingParams
from tercel.errors import EngineError, RequestError

if TYPE_CHECKING:
    from tercel.runtime.llm import LLM

app = typer.Typer(add_completion=False)

_HELP = "/reset forgets the conversation, /quit ends it; Ctrl-C stops an answer."


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model", "seed"))
@dataclass_options(SamplingParams, "sampling", skip=("logit_bias", "logprobs"))
def chat(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Whether answers start with thinking.")] = True,
    effort: Annotated[str, typer.Option(help="low, medium, high or max.")] = "max",
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model in the terminal; a pipe is read as one turn per line."""
    from tercel.cli.progress import loading_bar
    from tercel.runtime.llm import LLM

    if serve_as_rank(EngineConfig(model=str(model), **engine)):
        return
    params = SamplingParams(**sampling)
    with loading_bar() as progress:
        llm = LLM(str(model), progress=progress, **engine)
    with llm:
        options = {"thinking": thinking, "effort": effort}
        _Chat(llm, params, options, system, as_json).run()


class _Chat:
    """The conversation so far."""

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        options: dict[str, Any],
        system: str | None,
        as_json: bool,
    ) -> None:
        from tercel.cli.transcript import Transcript

        self._llm = llm
        self._params = params
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = [*self._system]
        self._as_json = as_json
        self._is_terminal = sys.stdin.isatty() and not as_json
        self._transcript = Transcript(is_silent=as_json)

    def run(self) -> None:
        """Turns until the input or /quit ends it."""
        for line in self._lines():
            match line.strip():
                case "":
                    continue
                case "/quit":
                    return
                case "/reset":
                    self._messages = [*self._system]
                case text:
                    self._turn(text)

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from standard_input.lines()
            return
        # Line editing and history for input().
        import readline  # noqa: F401

        typer.echo(_HELP)
        while True:
            try:
                yield input("> ")
            except EOFError:
                return

    def _turn(self, text: str) -> None:
        from tercel.cli.transcript import usage_of

        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            items = self._llm.chat(asked, self._params, stream=True, **self._options)
            completion = self._transcript.show(items)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            typer.echo("\n(stopped; the turn is forgotten)")
            return
        except (RequestError, EngineError) as error:
            # In a terminal a conversation that has grown too long can be reset.
            if not self._is_terminal:
                raise
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            return
        message = completion.message.to_message()
        self._messages = [*asked, message]
        if self._as_json:
            speed = self._transcript.speed(completion)
            typer.echo(json.dumps(message | usage_of(completion) | speed))
        else:
            self._transcript.print_speed(completion)
