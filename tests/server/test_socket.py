"""A real server process: disconnects, signals, the port, loading."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tercel.errors import ConfigError, EngineError
from tercel.server.run import bind, run
from tercel.server.service import Service
from tests.server.fakes import TOKENIZER, FakeEngine, message, says

ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


class Process:
    """A server process and what it prints."""

    def __init__(self, load_s: float, delay_s: float, shutdown_s: float) -> None:
        arguments = [str(value) for value in (load_s, delay_s, shutdown_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.line().split()[1]}"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_for_running(self, count: int) -> None:
        deadline, line = time.monotonic() + 20, f'running{{model_name="nano"}} {count}.0'
        while line not in httpx.get(self.url + "/metrics", timeout=20).text:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> Any:
        """The process has ended by itself; what it said last."""
        out, err = self._process.communicate(timeout=20)
        assert "Traceback" not in err or "CheckpointError" in err, err
        return json.loads(out.splitlines()[-1])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def server(*, load_s: float = 0, delay_s: float = 0, shutdown_s: float = 5) -> Iterator[Process]:
    process = Process(load_s, delay_s, shutdown_s)
    try:
        yield process
    finally:
        process.kill()


def test_openai_client_over_a_socket_and_sigterm() -> None:
    with server() as process:
        assert process.line().startswith("ready")
        client = openai.OpenAI(api_key="none", base_url=f"{process.url}/v1", max_retries=0)
        stream = client.chat.completions.create(model="nano", stream=True, **BODY)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "word " * 20
        with pytest.raises(openai.BadRequestError, match="did you mean 'top_p'"):
            client.chat.completions.create(model="nano", extra_body={"topp": 1}, **BODY)
        client.close()
        process.send(signal.SIGTERM)
        assert process.end() == {"aborted": 0, "closed": True, "signal": "SIGTERM"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    with server(delay_s=0.05) as process:
        process.line()
        body = BODY | {"stream": stream}
        try:
            timeout = 30 if stream else 0.5
            with httpx.stream("POST", process.url + CHAT, json=body, timeout=timeout) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not stream
        process.wait_for_running(0)
        process.send(signal.SIGTERM)
        assert process.end()["aborted"] == 1


def test_a_client_that_leaves_within_its_request_is_no_error() -> None:
    with server() as process:
        process.line()
        host, _, port = process.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            client.sendall(head.encode() + b"{")
            time.sleep(0.2)
        assert httpx.post(process.url + CHAT, json=BODY).status_code == 200
        process.send(signal.SIGTERM)
        assert process.end()["aborted"] == 0


def test_ctrl_c_lets_a_request_finish() -> None:
    with server(delay_s=0.005) as process:
        process.line()
        with httpx.stream("POST", process.url + CHAT, json=BODY | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send(signal.SIGINT)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert process.end() == {"aborted": 0, "closed": True, "signal": "SIGINT"}


def test_the_deadline_cancels_what_still_runs() -> None:
    with server(delay_s=1, shutdown_s=1) as process:
        process.line()
        body = BODY | {"stream": True}
        with httpx.stream("POST", process.url + CHAT, json=body, timeout=10) as response:
            lines = response.iter_lines()
            next(lines)
            process.send(signal.SIGTERM)
            *_, error, _, done, _ = lines
        assert "cancelled" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert process.end() == {"aborted": 1, "closed": True, "signal": "SIGTERM"}


def test_an_answer_that_the_deadline_cancels_is_503() -> None:
    with server(delay_s=1, shutdown_s=1) as process:
        process.line()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(httpx.post, process.url + CHAT, json=BODY, timeout=30)
            process.wait_for_running(1)
            process.send(signal.SIGTERM)
            response = answer.result()
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert process.end() == {"aborted": 1, "closed": True, "signal": "SIGTERM"}


def test_a_second_ctrl_c_ends_at_once() -> None:
    with server(delay_s=1, shutdown_s=30) as process:
        process.line()
        body = BODY | {"stream": True}
        with (
            suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", process.url + CHAT, json=body, timeout=10) as response,
        ):
            next(response.iter_lines())
            for _ in range(2):
                process.send(signal.SIGINT)
                time.sleep(0.3)
            started = time.monotonic()
            assert process.end()["closed"]
            assert time.monotonic() - started < 5


def test_health_while_loading_and_a_signal_then() -> None:
    with server(load_s=60) as process:
        response = httpx.get(process.url + "/health")
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
        process.send(signal.SIGINT)
        assert process.end() == {"aborted": 0, "closed": True, "signal": "SIGINT"}


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    with server(load_s=-1) as process:
        assert process.end() == {"aborted": 0, "closed": True, "signal": None}


@dataclass
class LostAtTheEnd(FakeEngine):
    """Loses a rank while it is closed."""

    async def lost(self) -> None:
        await super().lost()
        raise EngineError("rank 1 ended (SIGKILL)")


def test_a_rank_lost_after_the_last_request_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(LostAtTheEnd(says(message("fine"))), TOKENIZER, "nano")
    ended_by = run(
        service,
        bind("127.0.0.1", 0),
        shutdown_s=1,
        on_ready=lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    assert ended_by == signal.SIGTERM
    assert "rank 1 ended (SIGKILL) (while shutting down; no request was lost)" in caplog.text


def test_a_port_in_use_and_an_unknown_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is in use.*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host='no.such.host.invalid'"):
        bind("no.such.host.invalid", 0)
