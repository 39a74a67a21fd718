import json
import random
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tercel.runtime.chat import (
    ChatParser,
    ContentDelta,
    Done,
    ReasoningDelta,
    Segment,
    ToolArgumentsDelta,
    ToolCallStart,
    collect,
    encode,
    render,
    start_channel,
)
from tercel.runtime.chat.segments import close_tag, open_tag
from tercel.runtime.tokenizer import CLOSE, END_OF_MSG, EOS, OPEN, SEP, Tokenizer, byte_tokens

TOKENIZER = Tokenizer(byte_tokens())
HI = {"role": "user", "content": "hi"}
END = [Segment(END_OF_MSG, special=True)]
MESSAGE_END = close_tag("message") + END
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

LOOK_ALIKES = [
    f"{CLOSE}think{SEP}",
    f"{CLOSE}response{SEP}",
    f"{CLOSE}message{SEP}",
    f"{OPEN}response{SEP}",
    f'{OPEN}call tool="rm" index="1"{SEP}',
    f"{CLOSE}argument{SEP}",
    "<|",
    "|>",
    OPEN,
    CLOSE,
    SEP,
    END_OF_MSG,
    "[EOS]",
    "think",
    '"',
    "&quot;",
    "&amp;quot;",
    " \n",
    "\\",
    "🙂",
    "12345",
]
texts = st.lists(st.sampled_from(LOOK_ALIKES) | st.text(max_size=5), max_size=8).map("".join)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.tuples(texts.filter(bool), st.dictionaries(texts, values, max_size=4))
messages = st.fixed_dictionaries(
    {"reasoning": texts, "content": texts, "calls": st.lists(calls, max_size=3)}
)


def output(*parts):
    """Token ids of an output: lists of segments, and text spelled with ordinary tokens."""
    segments = []
    for part in parts:
        segments += [Segment(part)] if isinstance(part, str) else part
    return encode(TOKENIZER, segments)


def parse(ids, start="think", sizes=None, finish=True):
    """The collected message of one push, or of pushes of random sizes from a seed."""
    parser = ChatParser(TOKENIZER, start=start, call_id_prefix="id")
    events = []
    rng = random.Random(sizes)
    rest = list(ids)
    while rest:
        size = len(rest) if sizes is None else rng.randint(1, min(len(rest), 9))
        events += parser.push(rest[:size])
        rest = rest[size:]
    if finish:
        events += parser.finish()
    return collect(events)


def assistant(reasoning, content, calls, thinking=True):
    """An assistant turn as the model would write it: output ids and start channel."""
    tool_calls = [
        {"id": f"id{index}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    }
    prompt = render([HI], thinking=thinking)
    whole = render([HI, message], thinking=thinking, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    return encode(TOKENIZER, whole[len(prompt) :]), start_channel(prompt)


RICH = assistant(
    "I think 🙂 é",
    "Both.\n",
    [("search", {"q": 'a "b"\n🙂', "n": 12.5, "o": {"é": [1]}}), ("calc", {})],
)[0]


@settings(max_examples=40, deadline=None)
@given(messages, st.booleans(), st.integers(0, 9))
def test_parse_inverts_render(message, thinking, sizes):
    ids, start = assistant(**message, thinking=thinking)
    parsed = parse(ids, start, sizes)
    expected = message["reasoning"] if thinking and message["reasoning"].strip() else ""
    assert parsed.reasoning_content == expected
    assert parsed.content == message["content"]
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == message["calls"]
    assert [call.id for call in parsed.tool_calls] == [
        f"id{i}" for i in range(len(parsed.tool_calls))
    ]
    assert parsed.finish_reason == ("tool_calls" if message["calls"] else "stop")


@given(messages)
def test_a_parsed_message_renders_to_the_ids_it_came_from(message):
    assume(message["reasoning"].strip() or not message["reasoning"])
    ids, _ = assistant(**message)
    again = render([HI, parse(ids).to_message()], add_generation_prompt=False)
    assert encode(TOKENIZER, again)[-len(ids) :] == ids


@given(texts, st.integers(0, 9))
def test_unparsable_arguments_come_back_as_they_are(arguments, sizes):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    prompt = render([HI])
    whole = render([HI, message], add_generation_prompt=False)
    (parsed,) = parse(encode(TOKENIZER, whole[len(prompt) :]), sizes=sizes).tool_calls
    if arguments.strip() and not isinstance(_json_or_none(arguments), dict):
        assert parsed.arguments == arguments
    else:
        assert json.loads(parsed.arguments) == json.loads(arguments.strip() or "{}")


def _json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


CONTROLS = [OPEN, CLOSE, SEP, END_OF_MSG, EOS, "[PAD]", "<|media_pad|>"]
WORDS = ["think", "response", "tools", "call", "argument", "message", SEP, "{}", "1", " "]
WORDS += [' tool="f"', ' key="k"', ' type="number"', ' type="string"', ' tool="']
MARKERS = [
    open_tag("tools"),
    open_tag("call", ("tool", "f")),
    open_tag("argument", ("key", "k")),
    close_tag("think"),
    close_tag("response"),
    close_tag("tools"),
]
JSON_MARKERS = [open_tag("json"), close_tag("json"), [Segment("json")]]


def garbage(markers):
    """Ids of control tokens, words of the format, whole markers and anything else."""
    piece = (
        st.sampled_from(CONTROLS).map(lambda name: [TOKENIZER.encode_special(name)])
        | st.sampled_from(WORDS).map(TOKENIZER.encode)
        | st.sampled_from(markers).map(output)
        | st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=3)
    )
    return st.lists(piece, max_size=25).map(lambda pieces: list(chain.from_iterable(pieces)))


@given(garbage(MARKERS + JSON_MARKERS), st.sampled_from(["think", "response"]), st.integers(0, 99))
def test_garbage_is_parsed_alike_at_any_split(ids, start, sizes):
    assert parse(ids, start, sizes) == parse(ids, start)


@given(garbage(MARKERS))
def test_garbage_gives_whole_json_once_the_message_ended(ids):
    for call in parse([*ids, TOKENIZER.eos_id]).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(garbage(MARKERS + JSON_MARKERS))
def test_done_comes_once_and_last(ids):
    parser = ChatParser(TOKENIZER)
    events = [event for token_id in ids for event in parser.push([token_id])]
    events += parser.finish() + parser.finish()
    assert [isinstance(event, Done) for event in events].count(True) == 1
    assert isinstance(events[-1], Done)


@pytest.mark.parametrize("length", range(len(RICH) + 1))
def test_truncation_is_the_same_streamed_and_whole(length):
    whole = parse(RICH[:length])
    streamed = [parse(RICH[:length], sizes=seed) for seed in range(3)]
    assert streamed == [whole] * 3
    full = parse(RICH)
    assert full.reasoning_content.startswith(whole.reasoning_content.rstrip(REPLACEMENT))
    assert full.content.startswith(whole.content.rstrip(REPLACEMENT))
    for call, complete in zip(whole.tool_calls, full.tool_calls, strict=False):
        assert complete.arguments.startswith(call.arguments.rstrip(REPLACEMENT))
    in_thinking = length < RICH.index(TOKENIZER.encode_special(CLOSE))
    assert not (in_thinking and whole.content)


def test_what_was_streamed_is_never_taken_back():
    parser = ChatParser(TOKENIZER, call_id_prefix="id")
    events = [event for token_id in RICH for event in parser.push([token_id])]
    arguments = [e.text for e in events if isinstance(e, ToolArgumentsDelta)]
    # The string grows character by character; the other values arrive whole.
    assert arguments[:4] == ['{"q": "', "a", " ", '\\"']
    assert ', "n": 12.5' in arguments and ', "o": {"é": [1]}' in arguments
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts == [ToolCallStart(0, "id0", "search"), ToolCallStart(1, "id1", "calc")]
    assert events[-1] == Done("tool_calls")
    assert not any(REPLACEMENT in getattr(event, "text", "") for event in events)


def test_neighbouring_deltas_of_one_push_are_joined():
    events = ChatParser(TOKENIZER, call_id_prefix="id").push(RICH)
    assert events[:2] == [ReasoningDelta("I think 🙂 é"), ContentDelta("Both.\n")]
    assert [type(event).__name__ for event in events[2:]] == [
        "ToolCallStart",
        "ToolArgumentsDelta",
        "ToolCallStart",
        "ToolArgumentsDelta",
        "Done",
    ]


def test_call_ids_differ_between_outputs():
    first, second = (collect(ChatParser(TOKENIZER).push(RICH)).tool_calls for _ in range(2))
    assert len({call.id for call in first + second}) == 4


def test_reasoning_tokens_are_counted():
    parser = ChatParser(TOKENIZER)
    parser.push(output("abc", close_tag("think"), open_tag("response"), "abcdef"))
    assert parser.num_reasoning_tokens == len(output("abc", close_tag("think")))


OPEN_ONLY, CLOSE_ONLY = [Segment(OPEN, special=True)], [Segment(CLOSE, special=True)]
CALL = open_tag("call", ("tool", "f"), ("index", "1"))


def argument(value, kind="string", key="k"):
    return [*open_tag("argument", ("key", key), ("type", kind)), Segment(value)]


@pytest.mark.parametrize(
    ("parts", "reasoning", "content"),
    [
        # Thinking ends without its close.
        (["A", open_tag("response"), "B", MESSAGE_END], "A", "B"),
        (["A", close_tag("think"), "B", MESSAGE_END], "A", "B"),
        (["A", close_tag("think"), " \n", open_tag("response"), "B", END], "A", "B"),
        # Thinking was skipped: the text is the answer, and it was streamed as reasoning before.
        (["B", close_tag("response"), MESSAGE_END], "B", "B"),
        (["B", MESSAGE_END], "B", "B"),
        # A stop token alone proves nothing, and neither does the end of the tokens.
        (["A", END], "A", ""),
        (["A"], "A", ""),
        (["A", CLOSE_ONLY, "thin"], "A", ""),
        ([f"A{CLOSE}think{SEP}"], f"A{CLOSE}think{SEP}", ""),
        # The separator is spelled, or missing before the next control token.
        (["A", CLOSE_ONLY, f"think{SEP}", open_tag("response"), "B", MESSAGE_END], "A", "B"),
        (["A", CLOSE_ONLY, "think", open_tag("response"), "B", MESSAGE_END], "A", "B"),
        (["A", CLOSE_ONLY, "think<|sep", open_tag("response"), "B", MESSAGE_END], "A", "B"),
        # The model opens again what the prompt has opened.
        ([open_tag("think"), "A", close_tag("think"), "B", END], "A", "B"),
        ([OPEN_ONLY, f"think{SEP}A", close_tag("think"), "B", END], "A", "B"),
        (
            [
                open_tag("message", ("role", "assistant")),
                open_tag("think"),
                "A",
                open_tag("response"),
                "B",
                END,
            ],
            "A",
            "B",
        ),
        # Spelled markers count at the end of a channel that no real marker closes.
        ([f"A{CLOSE}think{SEP}", open_tag("response"), "B", MESSAGE_END], "A", "B"),
        (["A", close_tag("think"), f"B{CLOSE}response{SEP}{CLOSE}message{SEP}", END], "A", "B"),
        ([f"A{CLOSE}think{SEP}", close_tag("think"), "B", END], f"A{CLOSE}think{SEP}", "B"),
        (
            [f"A{CLOSE}think{SEP}{OPEN}response{SEP}B{CLOSE}response{SEP}", END],
            f"A{CLOSE}think{SEP}{OPEN}response{SEP}B",
            "B",
        ),
        # Control tokens that begin no marker are text; markers out of place are dropped.
        (["A", OPEN_ONLY, "table", close_tag("think"), "B", END], f"A{OPEN}table", "B"),
        (["A", close_tag("think"), "B", close_tag("call"), "C", END], "A", "BC"),
        (["A", close_tag("think"), "B", close_tag("response"), "C", END], "A", "BC"),
        # Nothing counts after the message.
        (["A", close_tag("think"), "B", MESSAGE_END, "C", open_tag("tools"), CALL], "A", "B"),
    ],
)
def test_recovery_of_channels(parts, reasoning, content):
    message = parse(output(*parts))
    assert (message.reasoning_content, message.content) == (reasoning, content)
    assert message.tool_calls == ()


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        ([CALL, close_tag("call")], ["{}"]),
        ([CALL, close_tag("call"), CALL, close_tag("call")], ["{}", "{}"]),
        # Every close is missing but the message's, or even that.
        (
            [CALL, argument("v"), CALL, argument("w", key="l"), MESSAGE_END],
            ['{"k": "v"}', '{"l": "w"}'],
        ),
        ([CALL, argument("v"), argument("1", "number", "l"), END], ['{"k": "v", "l": 1}']),
        ([CALL, argument("v"), close_tag("tools")], ['{"k": "v"}']),
        # Values that are not JSON fall back to strings; a missing type is a string.
        ([CALL, argument("1,5", "number"), END], ['{"k": "1,5"}']),
        ([CALL, argument("NaN", "number"), END], ['{"k": "NaN"}']),
        ([CALL, argument("[" * 100_000, "array"), END], ['{"k": "' + "[" * 100_000 + '"}']),
        ([CALL, argument(" [1,\n2] ", "array"), END], ['{"k": [1,\n2]}']),
        ([CALL, argument("x", "colour"), END], ['{"k": "x"}']),
        ([CALL, open_tag("argument", ("key", "k")), "x", END], ['{"k": "x"}']),
        # A key counts once, and an argument without one not at all.
        ([CALL, argument("1"), argument("2"), END], ['{"k": "1"}']),
        ([CALL, open_tag("argument", ("type", "string")), "x", END], ["{}"]),
        # A json block stands alone.
        ([CALL, open_tag("json"), '{"a"', close_tag("json"), argument("x"), END], ['{"a"']),
        ([CALL, open_tag("json"), close_tag("json"), END], ["{}"]),
        ([CALL, argument("x"), open_tag("json"), "y", END], ['{"k": "x"}']),
        # A call needs a name.
        ([open_tag("call", ("index", "1")), argument("x"), close_tag("call"), END], []),
        # Text between the markers, and everything after the tools, is ignored.
        ([" \n", CALL, "x", argument("v"), close_tag("argument"), "x", END], ['{"k": "v"}']),
        ([CALL, close_tag("call"), close_tag("tools"), CALL, argument("v"), END], ["{}"]),
        # Cut short: what is there stays, nothing is made up.
        ([CALL, argument("v")], ['{"k": "v']),
        ([CALL, argument("12", "number")], [""]),
        ([CALL, argument("v"), CLOSE_ONLY, "argum"], ['{"k": "v']),
    ],
)
@pytest.mark.parametrize("before", [[close_tag("think"), open_tag("response")], []])
def test_recovery_of_calls(before, parts, arguments):
    message = parse(output(*before, open_tag("tools"), *parts))
    assert [call.arguments for call in message.tool_calls] == arguments
    assert message.content == ""


def test_a_quoted_call_is_never_made():
    text = f'{OPEN}tools{SEP}{OPEN}call tool="rm" index="1"{SEP}{CLOSE}call{SEP}{CLOSE}tools{SEP}'
    for parts in ([text, END], [text, close_tag("think"), text, MESSAGE_END], [text, MESSAGE_END]):
        assert parse(output(*parts)).tool_calls == ()


def test_half_a_character_before_a_marker_belongs_to_the_channel_before_it():
    ids = [*output("A"), *"🙂".encode()[:2], *output(close_tag("think"), "B", END)]
    message = parse(ids)
    assert (message.reasoning_content, message.content) == (f"A{REPLACEMENT}", "B")


def test_a_header_that_grows_too_long_is_text():
    spaces = " " * 50_000
    assert parse(output(OPEN_ONLY, spaces)).reasoning_content == OPEN + spaces
    # A quoted value may be long; it ends with the next control token at the latest.
    message = parse(output(open_tag("tools"), OPEN_ONLY, 'call tool="' + "x" * 50_000, OPEN_ONLY))
    assert [len(call.name) for call in message.tool_calls] == [50_000]
