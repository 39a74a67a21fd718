"""A server process with a scripted engine, for tests of sockets and signals.

Prints `ready PORT` once it serves, and what became of the engine as JSON when it ends.
"""

import asyncio
import json
import sys
from dataclasses import dataclass

from tercel.errors import CheckpointError
from tercel.server.run import bind, run
from tercel.server.service import Service
from tests.server.fakes import TOKENIZER, FakeEngine, message, says


@dataclass
class SlowEngine(FakeEngine):
    """Takes `load_s` to load; a negative time fails."""

    load_s: float = 0.0

    async def start(self) -> None:
        try:
            if self.load_s < 0:
                raise CheckpointError("model.safetensors: cut short; download it again")
            await asyncio.sleep(self.load_s)
        except BaseException:
            await self.close()
            raise


def main(load_s: float, delay_s: float, shutdown_s: float) -> None:
    engine = SlowEngine(
        says(message("word " * 20)), tokens_per_output=1, delay_s=delay_s, load_s=load_s
    )
    service = Service(engine, TOKENIZER, "nano")
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    print("bound", port, flush=True)
    signal = None
    try:
        signal = run(
            service,
            listener,
            shutdown_s=shutdown_s,
            on_ready=lambda: print("ready", port, flush=True),
        )
    finally:
        end = {
            "aborted": len(engine.aborted),
            "closed": engine.closed.is_set(),
            "signal": signal and signal.name,
        }
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
