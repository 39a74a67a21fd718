"""`tercel generate`: one prompt, answered on the terminal or as JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tercel.cli import standard_input
from tercel.cli.options import Json, dataclass_options
from tercel.cli.ranks import serve_as_rank
from tercel.config import EngineConfig, SamplingParams
from tercel.errors import EngineError, RequestError

app = typer.Typer(add_completion=False)


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model", "seed"))
@dataclass_options(SamplingParams, "sampling", skip=("logit_bias", "logprobs"))
def generate(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    prompt: Annotated[str | None, typer.Argument(help="Default: standard input.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="A user's message, or text to continue.")
    ] = True,
    thinking: Annotated[bool, typer.Option(help="Whether the answer starts with thinking.")] = True,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete one prompt, streaming to the terminal."""
    from tercel.cli.progress import loading_bar
    from tercel.cli.transcript import Transcript, usage_of
    from tercel.runtime.llm import LLM

    if serve_as_rank(EngineConfig(model=str(model), **engine)):
        return
    params = SamplingParams(**sampling)
    text = "".join(standard_input.lines()) if prompt is None else prompt
    if not text.strip():
        raise RequestError("prompt", "it is empty; pass it as an argument or on standard input")
    with loading_bar() as progress:
        llm = LLM(str(model), progress=progress, **engine)
    with llm:
        if chat:
            transcript = Transcript(is_silent=as_json)
            message = [{"role": "user", "content": text}]
            completion = transcript.show(llm.chat(message, params, stream=True, thinking=thinking))
            answer = completion.message.to_message() | usage_of(completion)
        else:
            pieces = []
            for output in llm.generate(text, params, stream=True):
                pieces.append(output.text)
                if not as_json:
                    typer.echo(output.text, nl=False)
            if output.error is not None:
                raise EngineError(output.error)
            answer = {
                "text": "".join(pieces),
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.prompt_tokens,
                "completion_tokens": output.completion_tokens,
            }
    typer.echo(json.dumps(answer) if as_json else "")
