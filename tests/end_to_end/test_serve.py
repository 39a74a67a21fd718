"""`tercel serve` on a random tiny checkpoint: from the command line to no process left."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tercel.cli import main

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is 3 * 12?"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert main(["checkpoint", "make-tiny", str(directory), "--json"]) == 0
    return directory


@pytest.fixture
def server(model_dir):
    """The process and what it printed when it was ready."""
    command = [sys.executable, "-m", "tercel", "serve", str(model_dir), "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--num-threads", "1", "--cache-tokens", "4096"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_serve(server):
    process, ready = server
    assert ready["model"] == "tiny"
    client = openai.OpenAI(api_key="none", base_url=f"{ready['url']}/v1", max_retries=0)
    fields = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **fields)
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == 8
    stream = client.chat.completions.create(stream=True, **fields)
    deltas = [chunk.choices[0].delta for chunk in stream]
    text = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert text == answer.choices[0].message.reasoning_content
    assert httpx.get(f"{ready['url']}/health").status_code == 200

    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 128 + signal.SIGINT
    assert not any(child.is_running() for child in children)


def test_a_damaged_checkpoint_ends_serve_with_a_message(model_dir, tmp_path, capfd):
    for file in model_dir.iterdir():
        content = file.read_bytes()
        is_shard = file.suffix == ".safetensors"
        (tmp_path / file.name).write_bytes(content[:-1000] if is_shard else content)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ")
    assert "Traceback" not in err
    assert ".safetensors" in err
