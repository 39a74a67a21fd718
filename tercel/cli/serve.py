"""`tercel serve`: the OpenAI-compatible server."""

import json
import logging
import signal
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from tercel.cli.options import Json, dataclass_options
from tercel.cli.ranks import serve_as_rank
from tercel.config import EngineConfig
from tercel.core.model import read_config_json
from tercel.errors import ConfigError

app = typer.Typer(add_completion=False)

_QUESTION = "Tom has 4 bags with 12 apples each. He gives 9 apples away. How many are left?"


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model",))
def serve(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in requests. Default: the directory's name.")
    ] = None,
    shutdown_s: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish at the end.")
    ] = 10.0,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    _check_installed()
    from tercel.cli.progress import loading_bar
    from tercel.runtime.checkpoint import load_tokenizer
    from tercel.runtime.process import EngineClient
    from tercel.server.run import bind, run
    from tercel.server.service import Service

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = EngineConfig(model=str(model), **engine)
    read_config_json(model)
    if serve_as_rank(config):
        return
    name = served_model_name or model.resolve().name
    listener = bind(host, port)
    port = listener.getsockname()[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with ExitStack() as bars:
        bar = bars.enter_context(loading_bar())

        def report(done_bytes: int, total_bytes: int, waiting: str = "") -> None:
            bar(done_bytes, total_bytes)
            service.unready = "the model is loading" + (f", {waiting}" if waiting else "")

        def announce() -> None:
            bars.close()
            _announce(url, name, client.limits.max_model_len, as_json)

        client = EngineClient(config, progress=report)
        service = Service(client, load_tokenizer(config), name)
        ended_by = run(service, listener, shutdown_s=shutdown_s, on_ready=announce)
    if ended_by == signal.SIGINT:
        raise typer.Exit(128 + signal.SIGINT)


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "pydantic") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not installed; pip install 'tercel[serve]'")


def _announce(url: str, name: str, max_model_len: int, as_json: bool) -> None:
    if as_json:
        ready = {"url": url, "model": name, "max_model_len": max_model_len}
        print(json.dumps(ready), flush=True)
        return
    body = {"model": name, "messages": [{"role": "user", "content": _QUESTION}], "temperature": 0}
    data = json.dumps(body).replace("'", r"'\''")
    print(f"{name} is served at {url}/v1. Try:\n", flush=True)
    print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{data}'\n",
        flush=True,
    )
