import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tercel.config import SamplingParams
from tercel.errors import ConfigError, RequestError
from tercel.runtime.chat import ContentDelta, ReasoningDelta, ToolCallStart, encode, render
from tercel.runtime.completions import ChatCompletion
from tercel.runtime.llm import LLM
from tests.runtime.fakes import TOKENIZER, open_fake

OPTIONS = {"page_size": 4, "cache_tokens": 2048, "max_running": 4, "max_step_tokens": 64}
MESSAGES = [{"role": "user", "content": "hi"}]


def create(**options):
    fake = partial(open_fake, max_position_embeddings=1024, **options)
    return LLM("nowhere", open_model=fake, **OPTIONS)


def answers(messages, reply, **options):
    """A model that writes `reply`, an assistant message, after the prompt of `messages`."""
    prompt = encode(TOKENIZER, render(messages, **options))
    whole = encode(TOKENIZER, render([*messages, reply], add_generation_prompt=False, **options))
    assert whole[: len(prompt)] == prompt
    return lambda history, seed, vocab_size: whole[len(history)]


REPLY = {"role": "assistant", "reasoning_content": "let me see", "content": "one two three"}
CALLS = {
    "role": "assistant",
    "reasoning_content": "a tool",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}],
}


def test_generate_one_and_many():
    llm, params = create(), SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    one = llm.generate("hello", params)
    assert (one.finish_reason, one.prompt_tokens, one.completion_tokens) == ("length", 5, 8)
    assert llm.generate(TOKENIZER.encode("hello"), params) == one
    many = llm.generate(["hello", "world", "hello"], params)
    assert many[0] == many[2] == one != many[1]
    assert llm.generate([TOKENIZER.encode("world")], params) == [many[1]]


def test_generate_streams():
    llm, params = create(), SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    whole = llm.generate("hello", params)
    outputs = list(llm.generate("hello", params, stream=True))
    assert len(outputs) > 3
    assert "".join(output.text for output in outputs) == whole.text
    assert outputs[-1].finish_reason == "length"


def test_streams_may_be_read_in_turns_and_left():
    llm, params = create(), SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    first = llm.generate("hello", replace(params, max_tokens=100), stream=True)
    second = llm.generate("hello", params, stream=True)
    texts = [next(first).text, next(second).text]
    whole = llm.generate("hello", params)
    texts[1] += "".join(output.text for output in second)
    first.close()
    assert texts[1] == whole.text
    assert not llm.engine.has_work
    assert llm.engine.stats().counters.num_finished == {"length": 2, "abort": 1}


def test_chat():
    llm = create(draw=answers(MESSAGES, REPLY))
    answer = llm.chat(MESSAGES)
    assert (answer.reasoning_content, answer.content) == ("let me see", "one two three")
    assert answer.finish_reason == "stop"
    assert answer.reasoning_tokens > 0
    *events, last = llm.chat(MESSAGES, stream=True)
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "let me see"
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == "one two three"
    assert isinstance(last, ChatCompletion) and last == answer
    assert len(events) > 5


def test_chat_with_tools():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    llm = create(draw=answers(MESSAGES, CALLS, tools=tools))
    *events, last = llm.chat(MESSAGES, tools=tools, stream=True)
    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["add"]
    assert last.finish_reason == "tool_calls"
    assert last.message.tool_calls[0].arguments == '{"a": 1, "b": "x"}'


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("two", "let me see", "one "),
        ("o th", "let me see", "one tw"),
        ("me s", "let me see", "one two three"),
        ("threes", "let me see", "one two three"),
    ],
)
def test_chat_is_cut_before_a_stop_string(stop, reasoning, content):
    llm = create(draw=answers(MESSAGES, REPLY))
    answer = llm.chat(MESSAGES, SamplingParams(stop=(stop,)))
    assert (answer.reasoning_content, answer.content) == (reasoning, content)
    assert answer.finish_reason == "stop"
    assert answer.completion.stop_reason == (stop if content != "one two three" else None)
    assert not llm.engine.has_work


def test_the_first_tokens_of_a_chat_cannot_stop():
    llm = create(draw=answers(MESSAGES, REPLY))
    params = SamplingParams(stop=("o",), min_tokens=30)
    num_before = llm.chat(MESSAGES, SamplingParams(stop=("o",))).completion.completion_tokens
    assert num_before < 30 < llm.chat(MESSAGES, params).completion.completion_tokens


def test_chat_cut_by_length_keeps_the_engines_reason():
    llm = create(draw=answers(MESSAGES, REPLY))
    answer = llm.chat(MESSAGES, SamplingParams(max_tokens=4))
    assert answer.finish_reason == "length"
    assert "let me see".startswith(answer.reasoning_content)


def test_refusals():
    llm = create()
    with pytest.raises(RequestError, match="context limit"):
        llm.generate(["ok", "x" * 2000])
    with pytest.raises(RequestError, match="one prompt at a time"):
        llm.generate(["a", "b"], stream=True)
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate("")
    with pytest.raises(RequestError, match="messages"):
        llm.chat([])
    with pytest.raises(ConfigError, match="max_runing"):
        LLM("nowhere", max_runing=2)
    assert not llm.engine.has_work


def test_ctrl_c_ends_the_requests_of_the_step_only():
    presses = iter([False] * 3 + [True])

    def draw(history, seed, vocab_size):
        if next(presses, False):
            raise KeyboardInterrupt
        return 65

    with create(draw=draw) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", SamplingParams(max_tokens=9))
        assert not llm.engine.has_work
        assert llm.engine.stats().usage.num_used_pages == 0
        assert llm.generate("hello", SamplingParams(max_tokens=9)).text == "A" * 9


def test_importing_tercel_is_cheap():
    code = """
import sys, tercel
assert "torch" not in sys.modules and "zmq" not in sys.modules
from tercel import SamplingParams
assert "torch" not in sys.modules
import tercel.runtime.process
assert "torch" not in sys.modules
assert tercel.LLM.__name__ == "LLM"
try:
    tercel.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
