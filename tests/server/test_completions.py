"""The completions endpoint through the openai client."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.clients import http_client, openai_client, service_of
from tests.server.fakes import TOKENIZER, FakeEngine


def reversed_prompt(prompt_ids: Sequence[int]) -> Sequence[int]:
    return list(reversed(prompt_ids))


async def whole(engine: FakeEngine, **fields: Any) -> Any:
    async with openai_client(service_of(engine)) as client:
        return await client.completions.create(model="nano", **fields)


async def streamed(engine: FakeEngine, **fields: Any) -> list[Any]:
    async with openai_client(service_of(engine)) as client:
        options = {"include_usage": True}
        stream = await client.completions.create(
            model="nano", stream=True, stream_options=options, **fields
        )
        return [chunk async for chunk in stream]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["cba"]),
        (["abc", "de"], ["cba", "ed"]),
        (TOKENIZER.encode("abc"), ["cba"]),
        ([TOKENIZER.encode("abc"), TOKENIZER.encode("de")], ["cba", "ed"]),
        (["x" * n for n in range(1, 9)], ["x" * n for n in range(1, 9)]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, texts: list[str]) -> None:
    result = asyncio.run(whole(FakeEngine(reversed_prompt), prompt=prompt))
    assert [choice.text for choice in result.choices] == texts
    assert [choice.index for choice in result.choices] == list(range(len(texts)))
    assert result.usage.prompt_tokens == sum(map(len, texts))
    assert result.usage.completion_tokens == sum(map(len, texts))


def test_stream_adds_up_to_the_whole_answer() -> None:
    fields = {"prompt": ["abcdefg", "hijklmnopqrs"], "max_tokens": 9, "logprobs": 2}
    engine = FakeEngine(reversed_prompt, tokens_per_output=2)
    complete = asyncio.run(whole(engine, **fields))
    chunks = asyncio.run(streamed(engine, **fields))
    assert chunks[-1].usage == complete.usage
    for choice in complete.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert pieces[-1].finish_reason == choice.finish_reason
        tokens = [token for piece in pieces for token in piece.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
    assert [choice.finish_reason for choice in complete.choices] == ["stop", "length"]


def test_echo_repeats_the_prompt() -> None:
    result = asyncio.run(whole(FakeEngine(reversed_prompt), prompt="abc", echo=True))
    assert result.choices[0].text == "abccba"


def test_logprobs() -> None:
    result = asyncio.run(whole(FakeEngine(reversed_prompt), prompt="abc", logprobs=2))
    logprobs = result.choices[0].logprobs
    assert logprobs.tokens == ["c", "b", "a"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"a": -98.0, "b": -99.0}] * 3
    assert logprobs.text_offset == [0, 1, 2]


def test_defaults_and_stop_strings_are_the_engines() -> None:
    engine = FakeEngine(reversed_prompt)
    asyncio.run(whole(engine, prompt="abc", stop=["x", "y"]))
    assert engine.params[0].max_tokens == 16
    assert engine.params[0].stop == ("x", "y")


def test_one_failing_prompt_cancels_the_others() -> None:
    engine = FakeEngine(reversed_prompt, failure=RuntimeError("planted"))

    async def status() -> int:
        async with http_client(service_of(engine)) as http:
            body = {"prompt": ["a" * 40, "b" * 50]}
            return (await http.post("/v1/completions", json=body)).status_code

    assert asyncio.run(status()) == 500
    assert len(engine.aborted) == 2


def test_json_shape() -> None:
    async def body() -> Any:
        async with http_client(service_of(FakeEngine(reversed_prompt))) as http:
            return (await http.post("/v1/completions", json={"prompt": "abc"})).json()

    answer = asyncio.run(body())
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "nano",
        "choices": [{"text": "cba", "index": 0, "finish_reason": "stop", "logprobs": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
