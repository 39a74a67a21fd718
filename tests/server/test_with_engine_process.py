"""The server with the real engine client, its core in a process of its own, and a fake model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
from tercel.config import EngineConfig
from tercel.runtime.process import EngineClient
from tercel.server.run import bind, run
from tercel.server.service import Service
from tests.runtime.fakes import TOKENIZER
client = EngineClient(EngineConfig(), open_model="tests.runtime.fakes:open_slow")
listener = bind("127.0.0.1", 0)
service = Service(client, TOKENIZER, "nano")
def ready():
    print(listener.getsockname()[1], client.core_pid, flush=True)
ended_by = run(service, listener, shutdown_s=5, on_ready=ready)
sys.exit(ended_by == 2)
"""


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_answers_cancels_survives_and_ends() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port, core = map(int, process.stdout.readline().split())
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        fields: Any = {"model": "nano", "prompt": ["abc", "de"], "max_tokens": 20, "seed": 1}
        first = client.completions.create(**fields)
        again = client.completions.create(**fields)
        assert [c.text for c in first.choices] == [c.text for c in again.choices]
        assert first.usage == again.usage
        streamed = client.completions.create(stream=True, **fields)
        pieces = {0: "", 1: ""}
        for chunk in streamed:
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
        assert list(pieces.values()) == [c.text for c in first.choices]
        chat = client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "hi"}], max_tokens=10
        )
        assert chat.usage is not None and 0 < chat.usage.completion_tokens <= 10

        body = {"prompt": "a", "ignore_eos": True, "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        deadline = time.monotonic() + 5
        while 'running{model_name="nano"} 0.0' not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
        too_long = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 5000})
        assert too_long.status_code == 400
        assert json.loads(too_long.text)["error"]["param"] == "prompt"
        assert httpx.get(f"{url}/health").status_code == 200

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 1
        assert not exists(core)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("when", ["idle", "in a request", "in a request, while shutting down"])
def test_a_killed_core_ends_the_server(when: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port, core = map(int, process.stdout.readline().split())
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "a", "ignore_eos": True, "max_tokens": 3000, "stream": True}
        if when == "idle":
            os.kill(core, signal.SIGKILL)
        else:
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                if when.endswith("while shutting down"):
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.3)
                os.kill(core, signal.SIGKILL)
                assert any('"error"' in line and "SIGKILL" in line for line in lines)
        _, err = process.communicate(timeout=15)
        assert process.returncode == 1
        assert "EngineError: the engine core ended (SIGKILL)" in err
    finally:
        process.kill()
        process.communicate()
