import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tercel.config import EngineConfig, SamplingParams
from tercel.errors import CheckpointError, ConfigError, EngineError, RequestError
from tercel.runtime.messages import Failure
from tercel.runtime.process import EngineClient
from tests.runtime.fakes import TOKENIZER

CONFIG = EngineConfig(page_size=4, cache_tokens=4096, max_running=4, max_step_tokens=16)
PROMPT = TOKENIZER.encode("hello")
FAKES = "tests.runtime.fakes"
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


def run(scenario, open_model="open_fake", **options):
    """Runs `scenario(client)` and checks that no process and no file stays."""

    async def body():
        client = EngineClient(CONFIG, open_model=f"{FAKES}:{open_model}", **options)
        async with client:
            pid = client.core_pid
            result = await asyncio.wait_for(scenario(client), 20)
        assert not is_running(pid)
        assert not Path(client._directory).exists()
        return result

    return asyncio.run(body())


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pid, seconds=10):
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.02)


async def collect(client, name, params):
    return [output async for output in client.generate(name, PROMPT, params)]


def test_generates_like_the_engine_in_process():
    seen = []

    async def scenario(client):
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, logprobs=1)
        whole = await asyncio.gather(*(collect(client, name, params) for name in "abcdef"))
        return whole, await client.stats(), client.limits

    whole, stats, limits = run(scenario, progress=lambda *report: seen.append(report))
    assert seen == [(1, 1, "")]
    assert len({"".join(output.text for output in outputs) for outputs in whole}) == 1
    for outputs in whole:
        assert outputs[-1].finish_reason == "length"
        assert sum(len(output.logprobs) for output in outputs) == 20
    assert stats.counters.num_finished == {"length": 6}
    assert stats.usage.num_used_pages == 0
    assert (limits.max_model_len, limits.vocab_size) == (64, TOKENIZER.vocab_size)


def test_refusals_name_the_field_and_leave_the_core_alive():
    async def scenario(client):
        with pytest.raises(RequestError, match="context limit") as caught:
            client.generate("a", PROMPT * 1000, LONG)
        assert caught.value.field == "prompt"
        running = client.generate("a", PROMPT, LONG)
        await anext(running)
        with pytest.raises(RequestError, match="in use"):
            client.generate("a", PROMPT, LONG)
        await running.aclose()
        return await collect(client, "b", SamplingParams(max_tokens=2))

    assert run(scenario, "open_slow")[-1].finish_reason in ("length", "stop")


def test_closing_the_iterator_aborts_the_request():
    async def scenario(client):
        outputs = client.generate("a", PROMPT, LONG)
        await anext(outputs)
        await outputs.aclose()
        task = asyncio.create_task(collect(client, "b", LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await client.stats()

    stats = run(scenario, "open_slow")
    assert stats.counters.num_finished == {"abort": 2}
    assert (stats.usage.num_used_pages, stats.usage.num_used_slots) == (0, 0)


def test_an_id_may_be_used_again_at_once_or_is_refused():
    """Outputs of an abandoned request never reach the next one of its name."""

    async def scenario(client):
        params, texts = SamplingParams(max_tokens=6, ignore_eos=True, seed=1), set()
        for _ in range(20):
            outputs = client.generate("a", PROMPT, LONG)
            await anext(outputs)
            await outputs.aclose()
            while True:
                try:
                    again = await collect(client, "a", params)
                    break
                except RequestError as error:
                    assert "in use" in str(error)
                    await asyncio.sleep(0)
            texts.add("".join(output.text for output in again))
            assert again[-1].completion_tokens == 6
        assert len(texts) == 1

    run(scenario)


def test_closed_without_a_start():
    asyncio.run(EngineClient(CONFIG).close())


def test_aborted_while_draining():
    async def scenario(client):
        outputs = client.generate("a", PROMPT, LONG)
        await anext(outputs)
        closing = asyncio.create_task(client.close(drain_s=15))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await outputs.aclose()
        await closing
        assert time.monotonic() - started < 2

    run(scenario, "open_slow")


def test_abort_gives_a_last_output():
    async def scenario(client):
        outputs = client.generate("a", PROMPT, LONG)
        await anext(outputs)
        await client.abort("a")
        return [output async for output in outputs]

    assert run(scenario, "open_slow")[-1].finish_reason == "abort"


def test_a_killed_core_ends_every_request_promptly():
    async def scenario(client):
        tasks = [asyncio.create_task(collect(client, name, LONG)) for name in "abcdef"]
        await asyncio.sleep(0.2)
        os.kill(client.core_pid, signal.SIGKILL)
        started = time.monotonic()
        results = await asyncio.gather(*tasks, client.stats(), return_exceptions=True)
        assert time.monotonic() - started < 2
        assert [type(result) for result in results] == [EngineError] * 7
        assert "SIGKILL" in str(results[0])
        assert not client.is_alive
        with pytest.raises(EngineError, match="SIGKILL"):
            client.generate("z", PROMPT, LONG)

    run(scenario, "open_slow")


def test_a_step_that_fails_says_why():
    async def scenario(client):
        with pytest.raises(EngineError, match="RuntimeError: device lost"):
            await collect(client, "a", LONG)

    run(scenario, "open_failing")


@pytest.mark.parametrize(
    ("open_model", "kind", "message"),
    [
        ("open_damaged", CheckpointError, "weights.safetensors: cut short; download it again"),
        ("open_refused", ConfigError, "layout: 'x' is not a layout name"),
        ("open_missing", EngineError, "AttributeError: .*open_missing"),
        ("open_dying", EngineError, r"exit code 3"),
    ],
)
def test_load_errors_arrive_as_they_were(open_model, kind, message):
    async def scenario(client):
        raise AssertionError("it started")

    with pytest.raises(kind, match=message):
        run(scenario, open_model)


def test_failures_keep_class_message_and_field():
    for error in (RequestError("stop", "too long"), ConfigError("x"), EngineError("y")):
        packed = msgspec.msgpack.encode(Failure.of(error))
        again = msgspec.msgpack.decode(packed, type=Failure).error()
        assert (type(again), str(again)) == (type(error), str(error))


def test_close_lets_requests_finish_within_the_deadline():
    async def scenario(client):
        short = SamplingParams(max_tokens=10, ignore_eos=True)
        tasks = [
            asyncio.create_task(collect(client, "short", short)),
            asyncio.create_task(collect(client, "long", LONG)),
        ]
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(client.close(drain_s=0.4))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="shutting down"):
            client.generate("late", PROMPT, short)
        await closing
        return [(await task)[-1].finish_reason for task in tasks]

    assert run(scenario, "open_slow") == ["length", "abort"]


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_while_loading(times):
    """As by Ctrl-C; a second one cancels the end as well."""

    async def body():
        client = EngineClient(CONFIG, open_model=f"{FAKES}:open_sleeping")
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.5)
        pid = client.core_pid
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(starting, return_exceptions=True)
        wait_until_gone(pid)
        assert not Path(client._directory).exists()

    asyncio.run(body())


def test_no_file_is_left_for_a_kill_while_it_serves():
    async def scenario(client):
        assert not Path(client._directory).exists()
        return await collect(client, "a", SamplingParams(max_tokens=2))

    assert run(scenario)[-1].finish_reason in ("length", "stop")


def test_a_core_that_is_lost_and_one_that_is_closed():
    async def scenario(client):
        lost = asyncio.create_task(client.lost())
        os.kill(client.core_pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await lost

    run(scenario)

    async def closed(client):
        lost = asyncio.create_task(client.lost())
        await asyncio.sleep(0)
        await client.close()
        await lost

    run(closed)


PARENT = f"""
import asyncio, sys
from tercel.config import EngineConfig, SamplingParams
from tercel.runtime.process import EngineClient

async def main():
    config = EngineConfig(page_size=4, cache_tokens=4096)
    async with EngineClient(config, open_model="{FAKES}:open_slow") as client:
        print(client.core_pid, flush=True)
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        async for _ in client.generate("a", [1, 2], params):
            pass

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_the_core_ends_with_its_parent(number):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    core = int(parent.stdout.readline())
    os.killpg(parent.pid, number)
    parent.wait(10)
    parent.stdout.close()
    wait_until_gone(core)
