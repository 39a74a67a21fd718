"""The chat endpoint through the openai client."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tercel.runtime.chat import encode, render
from tests.server.clients import http_client, openai_client, service_of
from tests.server.fakes import TOKENIZER, FakeEngine, message, says

QUESTION: Any = [{"role": "user", "content": "Tom has 3 bags of 12 apples. How many apples?"}]
CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object"}},
}
ANSWER = message("The answer is 36.", "3 * 12 = 36.")
CALLS = message(
    "",
    "I calculate.",
    [("calculator", {"expression": '3 * "12"'}), ("calculator", {"expression": "1 + 1"})],
)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def whole(engine: FakeEngine, **fields: Any) -> Any:
    async with openai_client(service_of(engine)) as client:
        fields.setdefault("messages", QUESTION)
        return await client.chat.completions.create(model="nano", **fields)


async def streamed(engine: FakeEngine, **fields: Any) -> list[Any]:
    async with openai_client(service_of(engine)) as client:
        fields.setdefault("messages", QUESTION)
        fields.setdefault("stream_options", {"include_usage": True})
        stream = await client.chat.completions.create(model="nano", stream=True, **fields)
        return [chunk async for chunk in stream]


def test_reasoning_and_answer_apart() -> None:
    result = run(whole(FakeEngine(says(ANSWER))))
    choice = result.choices[0]
    assert choice.message.reasoning_content == "3 * 12 = 36."
    assert choice.message.content == "The answer is 36."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    prompt, output = encode(TOKENIZER, render(QUESTION)), encode(TOKENIZER, ANSWER)
    thought = len(encode(TOKENIZER, message("", "3 * 12 = 36.")[:1]))
    assert result.usage.prompt_tokens == len(prompt)
    assert result.usage.completion_tokens == len(output)
    assert result.usage.total_tokens == len(prompt) + len(output)
    assert result.usage.prompt_tokens_details.cached_tokens == 0
    assert result.usage.completion_tokens_details.reasoning_tokens >= thought


def test_prompt_is_the_rendered_conversation() -> None:
    engine = FakeEngine(says(ANSWER))
    run(whole(engine, tools=[CALCULATOR], tool_choice="required"))
    expected = render(QUESTION, tools=[CALCULATOR], tool_choice="required")
    assert engine.prompts == [encode(TOKENIZER, expected)]


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"extra_body": {"thinking": {"type": "disabled"}}}, False, "max"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": False}}}, False, "max"),
        (
            {"reasoning_effort": "low", "extra_body": {"thinking": {"effort": "high"}}},
            True,
            "high",
        ),
        (
            {
                "extra_body": {
                    "thinking": {"type": "enabled", "keep": "all"},
                    "chat_template_kwargs": {"thinking": False},
                }
            },
            True,
            "max",
        ),
    ],
)
def test_thinking_fields(fields: Any, thinking: bool, effort: str) -> None:
    output = message("yes", "" if thinking else None)
    engine = FakeEngine(says(output))
    result = run(whole(engine, **fields))
    expected = render(QUESTION, thinking=thinking, effort=effort)
    assert engine.prompts == [encode(TOKENIZER, expected)]
    assert result.choices[0].message.content == "yes"


def test_tool_calls() -> None:
    result = run(whole(FakeEngine(says(CALLS)), tools=[CALCULATOR]))
    choice = result.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["calculator", "calculator"]
    arguments = [json.loads(call.function.arguments) for call in calls]
    assert arguments == [{"expression": '3 * "12"'}, {"expression": "1 + 1"}]
    assert len({call.id for call in calls}) == 2


def test_tool_results_come_back() -> None:
    engine = FakeEngine(says(CALLS))
    first = run(whole(engine, tools=[CALCULATOR])).choices[0].message
    history = [*QUESTION, first.model_dump()]
    for call in first.tool_calls:
        history.append({"role": "tool", "tool_call_id": call.id, "content": "36"})
    engine.script = says(ANSWER)
    result = run(whole(engine, messages=history, tools=[CALCULATOR]))
    assert result.choices[0].message.content == "The answer is 36."


@pytest.mark.parametrize("tokens_per_output", [1, 2, 5, 1000])
@pytest.mark.parametrize("max_tokens", [1, 7, 30, 55, 1000])
@pytest.mark.parametrize("output", [ANSWER, CALLS], ids=["answer", "calls"])
@pytest.mark.parametrize("stop", [None, "er is"])
def test_stream_adds_up_to_the_whole_answer(
    output: Any, max_tokens: int, tokens_per_output: int, stop: Any
) -> None:
    engine = FakeEngine(says(output), tokens_per_output=tokens_per_output)
    fields = {"max_tokens": max_tokens, "stop": stop, "logprobs": True, "top_logprobs": 2}
    complete = run(whole(engine, **fields)).choices[0]
    result = run(whole(engine, **fields))
    chunks = run(streamed(engine, **fields))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    arguments: dict[int, str] = {}
    for delta in deltas:
        for piece in delta.tool_calls or ():
            arguments[piece.index] = arguments.get(piece.index, "") + piece.function.arguments
    assert content == (complete.message.content or "")
    assert reasoning == getattr(complete.message, "reasoning_content", "")
    whole_arguments = [call.function.arguments for call in complete.message.tool_calls or ()]
    assert list(arguments.values()) == whole_arguments
    last = [choice for chunk in chunks for choice in chunk.choices][-1]
    assert last.finish_reason == complete.finish_reason
    assert chunks[-1].usage == result.usage
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert tokens == complete.logprobs.content
    assert len(tokens) == result.usage.completion_tokens


def test_cut_thinking_stays_reasoning() -> None:
    result = run(whole(FakeEngine(says(ANSWER)), max_tokens=4))
    assert result.choices[0].finish_reason == "length"
    assert result.choices[0].message.content == ""
    assert "3 * 12".startswith(result.choices[0].message.reasoning_content.strip())


def test_stop_strings_end_the_answer_and_not_the_thinking() -> None:
    engine = FakeEngine(says(message("one. two. three", "1. two. 3")), tokens_per_output=1)
    choice = run(whole(engine, stop=[" two", "three"])).choices[0]
    assert choice.message.reasoning_content == "1. two. 3"
    assert choice.message.content == "one."
    assert choice.finish_reason == "stop"
    assert len(engine.aborted) == 1
    assert engine.params[0].stop == ()


def test_min_tokens_keeps_stop_strings_from_ending() -> None:
    choice = run(
        whole(
            FakeEngine(says(message("a b c", None)), tokens_per_output=1),
            stop="b",
            extra_body={"min_tokens": 20, "thinking": {"type": "disabled"}},
        )
    ).choices[0]
    assert choice.message.content == "a b c"


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine(says(ANSWER))
    run(
        whole(
            engine,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={"97": -3},
            seed=7,
            max_completion_tokens=50,
            max_tokens=10,
            n=1,
            extra_body={
                "top_k": -1,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "stop_token_ids": [98],
                "ignore_eos": True,
            },
        )
    )
    params = engine.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.05)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.repetition_penalty, params.seed, params.max_tokens) == (1.1, 7, 50)
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos) == (2, (98,), True)
    assert params.logit_bias == {97: -3}


def test_output_fills_the_context_by_default() -> None:
    engine = FakeEngine(says(ANSWER))
    run(whole(engine))
    assert engine.params[0].max_tokens == engine.limits.max_model_len


def test_inert_fields_change_nothing() -> None:
    engine = FakeEngine(says(ANSWER))
    run(whole(engine, user="me", metadata={"a": "b"}, store=True, parallel_tool_calls=True))
    run(whole(engine))
    assert engine.params[0] == engine.params[1]
    assert engine.prompts[0] == engine.prompts[1]


def test_usage_is_sent_only_where_asked_for() -> None:
    chunks = run(streamed(FakeEngine(says(ANSWER)), stream_options={"include_usage": False}))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_engine_failure_before_and_after_the_first_token() -> None:
    engine = FakeEngine(says(ANSWER), failure=RuntimeError("planted"))
    with pytest.raises(openai.InternalServerError):
        run(whole(engine))
    with pytest.raises(openai.APIError, match="internal error"):
        run(streamed(engine))
    assert len(engine.aborted) == 2


def test_json_shapes() -> None:
    async def bodies() -> tuple[Any, list[Any]]:
        async with http_client(service_of(FakeEngine(says(ANSWER), tokens_per_output=99))) as http:
            fields = {"model": "nano", "messages": QUESTION}
            url = "/v1/chat/completions"
            complete = await http.post(url, json=fields)
            stream = await http.post(url, json=fields | {"stream": True})
            assert stream.headers["content-type"].startswith("text/event-stream")
            return complete.json(), stream.text.split("\n\n")

    complete, events = run(bodies())
    for key in ("id", "created"):
        complete.pop(key)
    num_prompt, num_output = (
        len(encode(TOKENIZER, render(QUESTION))),
        len(encode(TOKENIZER, ANSWER)),
    )
    usage = complete.pop("usage")
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
    }
    assert complete == {
        "object": "chat.completion",
        "model": "nano",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "The answer is 36.",
                    "reasoning_content": "3 * 12 = 36.",
                },
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
    }
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "3 * 12 = 36."},
        {"content": "The answer is 36."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
