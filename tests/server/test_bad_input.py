"""Every bad request gets a clear error object, and the next good one is answered."""

import asyncio
import json
from typing import Any

import pytest

from tercel.errors import EngineError, RequestError
from tercel.runtime.sequence import Limits
from tercel.server.protocol import MAX_PROMPTS
from tercel.server.service import Service
from tests.server.clients import http_client, service_of
from tests.server.fakes import TOKENIZER, FakeEngine, message, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def engine() -> FakeEngine:
    return FakeEngine(says(message("fine")), limits=Limits(2000, TOKENIZER.vocab_size))


async def _send(service: Service, method: str, url: str, body: Any) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http_client(service) as http:
        response = await http.request(method, url, content=content)
        answer = response.json()
        if service.unready is None:
            good = await http.post(CHAT, json=GOOD)
            assert good.status_code == 200, good.text
        return response.status_code, answer


def send(url: str, body: Any, *, method: str = "POST", service: Service | None = None) -> Any:
    """The status and the error object."""
    status, answer = asyncio.run(_send(service or service_of(engine()), method, url, body))
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


def system_tools(*tools: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "tools": list(tools)}, *GOOD["messages"]]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", "body", "JSON"),
        (b"{", "body", "JSON"),
        (b'{"messages": [}', "body", "line 1 column"),
        (b'{"messages": "\xff\xfe"}', "body", "UTF-8"),
        (b'{"messages": "\\ud800"}', "body", "JSON"),
        (b'{"temperature": NaN}', "body", "JSON"),
        (b"[" * 100_000, "body", "JSON"),
        (b"[]", "body", "object"),
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": ["hi"]}, "messages[0]", "found 'hi'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "array"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "string"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x", "unknown"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            {"messages": [*GOOD["messages"], {"role": "tool", "content": "3"}]},
            "messages[1].tool_call_id",
            "string",
        ),
        (GOOD | {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        (GOOD | {"qqqqq": 1}, "qqqqq", "remove it"),
        (GOOD | {"functions": []}, "functions", "use `tools`"),
        (GOOD | {"temperature": "hot"}, "temperature", "number"),
        (GOOD | {"temperature": "1"}, "temperature", "number"),
        (GOOD | {"temperature": True}, "temperature", "number"),
        (GOOD | {"temperature": -1}, "temperature", "-1"),
        (GOOD | {"top_p": 0}, "top_p", "outside"),
        (GOOD | {"top_k": 1.5}, "top_k", "integer"),
        (GOOD | {"max_tokens": 0}, "max_tokens", "outside"),
        (GOOD | {"max_tokens": "many"}, "max_tokens", "integer"),
        (GOOD | {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "outside"),
        (GOOD | {"n": 2}, "n", "use 1"),
        (GOOD | {"stop": [1]}, "stop", "strings"),
        (GOOD | {"stop": ""}, "stop", "empty"),
        (GOOD | {"stop": ["x"] * 65}, "stop", "65 strings are more than 64"),
        (GOOD | {"seed": -1}, "seed", "outside"),
        (GOOD | {"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        (GOOD | {"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        (GOOD | {"logit_bias": {"1": 101}}, "logit_bias", "101"),
        (GOOD | {"top_logprobs": 1}, "top_logprobs", "logprobs"),
        (GOOD | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (GOOD | {"stream": "yes"}, "stream", "boolean"),
        (GOOD | {"stream_options": {}}, "stream_options", "stream"),
        (
            GOOD | {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "unknown",
        ),
        (GOOD | {"reasoning_effort": "extreme"}, "reasoning_effort", "max"),
        (GOOD | {"thinking": {"type": "maybe"}}, "thinking.type", "enabled"),
        (GOOD | {"thinking": {"keep": "some"}}, "thinking.keep", "all"),
        (GOOD | {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "unknown"),
        (GOOD | {"tool_choice": "required"}, "tool_choice", "tools"),
        (GOOD | {"tool_choice": "maybe"}, "tool_choice", "auto"),
        (GOOD | {"tools": {}}, "tools", "list"),
        (GOOD | {"tools": [None]}, "tools[0]", "object"),
        (GOOD | {"tools": [TOOL, TOOL]}, "tools[1].function.name", "already"),
        (
            GOOD | {"tools": [{"type": "function", "function": {"name": "1f"}}]},
            "tools[0].function.name",
            "letter",
        ),
        (system_tools({"type": "x"}), "messages[0].tools[0].type", "function"),
        (system_tools(TOOL) | {"tools": [TOOL]}, "messages[0].tools[0].function.name", "already"),
        (GOOD | {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (
            GOOD | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "object",
        ),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "messages", "2000 tokens"),
        (GOOD | {"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ],
)
def test_chat_refuses(body: Any, param: str, words: str) -> None:
    status, error = send(CHAT, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "long " * 2000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_completions_refuse(body: Any, param: str) -> None:
    status, error = send(TEXT, body)
    assert (status, error["param"]) == (400, param)


def test_too_many_prompts() -> None:
    assert send(TEXT, {"prompt": ["a"] * MAX_PROMPTS + ["b"]})[1]["param"] == "prompt"
    _, error = send(TEXT, {"prompt": [[1]] * 5000})
    assert error["message"].startswith("prompt: 5,000 prompts are more than 1024")


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_a_body_that_is_too_long(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercel.server.answer.MAX_BODY_BYTES", 1000)
    status, error = send(url, GOOD | {"user": "x" * 1000})
    assert (status, error["param"]) == (413, "body")
    assert "longer than 1,000 bytes" in error["message"]


def test_a_long_value_is_not_repeated_in_the_message() -> None:
    _, error = send(CHAT, {"messages": "x" * 100_000})
    assert len(error["message"]) < 300


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_unknown_model(url: str) -> None:
    status, error = send(
        url, GOOD | {"model": "gpt"} if url == CHAT else {"prompt": "a", "model": "gpt"}
    )
    assert (status, error["param"]) == (404, "model")
    assert "'nano'" in error["message"]


def test_unknown_path_and_method() -> None:
    status, error = send("/v1/nothing", {})
    assert status == 404
    assert "POST /v1/chat/completions" in error["message"]
    assert send(CHAT, b"", method="GET")[0] == 405


def test_a_request_that_the_engine_refuses() -> None:
    refusing = engine()
    service = service_of(refusing)
    normal = refusing.generate
    refusals = [RequestError("prompt", "it needs more pages than the cache has")]

    def generate(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return normal(*arguments)

    refusing.generate = generate  # type: ignore[method-assign]
    status, error = send(CHAT, GOOD, service=service)
    assert (status, error["param"]) == (400, "prompt")


def test_loading_and_dead_engines_are_503() -> None:
    loading = service_of(engine())
    loading.unready = "the model is loading"
    for method, url, body in [("POST", CHAT, GOOD), ("GET", "/health", b"")]:
        status, error = send(url, body, method=method, service=loading)
        assert (status, error["type"]) == (503, "server_error")
        assert "loading" in error["message"]
    dying = FakeEngine(says(message("fine")), failure=EngineError("the core was killed"))
    dead = service_of(dying)
    status, error = send(CHAT, GOOD, service=dead)
    assert status == 500
    status, error = send(CHAT, GOOD, service=dead)
    assert (status, error["message"]) == (503, "the core was killed")
    status, error = send("/health", b"", method="GET", service=dead)
    assert (status, error["message"]) == (503, "the core was killed")


def test_an_idle_engine_that_dies_is_noticed_by_health() -> None:
    service = service_of(engine())
    service.engine.failure = EngineError("the core was killed")  # type: ignore[attr-defined]
    assert send("/health", b"", method="GET", service=service)[0] == 503


def test_models_health_and_metrics() -> None:
    async def ask() -> None:
        fake = engine()
        async with http_client(service_of(fake)) as http:
            models = (await http.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["nano"]
            assert models["data"][0]["max_model_len"] == 2000
            assert (await http.get("/v1/models/nano")).json() == models["data"][0]
            assert (await http.get("/v1/models/other")).status_code == 404
            assert (await http.get("/health")).json() == {"status": "ok", "model": "nano"}
            await http.post(CHAT, json=GOOD)
            for seconds in (0.05, 100):
                fake.counters.time_to_first_token_s.observe(seconds)
            text = (await http.get("/metrics")).text
        for line in (
            'tercel:request_success_total{finished_reason="stop",model_name="nano"} 1.0',
            'tercel:num_requests_running{model_name="nano"} 0.0',
            'tercel:kv_cache_usage_perc{model_name="nano"} 0.25',
            'tercel:time_to_first_token_seconds_bucket{le="+Inf",model_name="nano"} 2.0',
            'tercel:time_to_first_token_seconds_bucket{le="0.1",model_name="nano"} 1.0',
            'tercel:time_to_first_token_seconds_count{model_name="nano"} 2.0',
            'tercel:time_to_first_token_seconds_sum{model_name="nano"} 100.05',
            'tercel:engine_ready{model_name="nano"} 1.0',
        ):
            assert line in text
        assert "tercel:prompt_tokens_total" in text
        assert "tercel:generation_tokens_total" in text

    asyncio.run(ask())
