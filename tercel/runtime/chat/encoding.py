"""K3's chat encoding: messages and tools to the exact segments that the model was trained on.

    [tool-declare] [thinking-effort] messages... [tool-choice] [response-format] generation prompt

The bracketed parts are system messages that the encoder writes itself. There is no BOS.
Source: the published K3 checkpoint's chat encoder.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tercel.errors import RequestError
from tercel.runtime.chat.checks import check_request
from tercel.runtime.chat.segments import END_OF_MESSAGE, Segment, close_tag, open_tag, text

Message = Mapping[str, Any]

_TOOLS_HEADER = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS_HEADER = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
# The text names `medium` and the model was trained on it as it stands.
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting."
)
_RESPONSE_SCHEMA = "\nThe JSON data must match the following schema:\n"


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The segments of a chat prompt.

    Args:
        messages: roles system, user, assistant and tool; other roles render nothing. A last
            assistant message with `partial: true` is left open for the model to continue:
            inside its response if it has content, else inside its thinking.
        tools: function tools in the OpenAI form. A system message may carry more.
        thinking: whether assistant turns have a think channel.
        effort: low, medium, high or max; None leaves the directive out. Unused without thinking.
        tool_choice: auto, none or required.
        response_format: type text, json_object or json_schema.
        add_generation_prompt: open an assistant message at the end.

    Raises:
        RequestError: a field that is wrong, with the fix.
    """
    check_request(messages, tools, effort, tool_choice, response_format)
    open_message = messages[-1] if add_generation_prompt and messages[-1].get("partial") else None
    segments: list[Segment] = []
    if tools:
        segments += _system("tool-declare", _TOOLS_HEADER + _fenced(tools))
    if thinking and effort:
        segments += _system("thinking-effort", _EFFORT.format(effort))
    segments += _conversation(messages[:-1] if open_message else messages, thinking=thinking)
    has_tools = bool(tools) or any(message.get("tools") for message in messages)
    if tool_choice == "required" or (tool_choice == "none" and has_tools):
        segments += _system("tool-choice", _TOOL_CHOICE[tool_choice])
    segments += _response_format(response_format)
    if add_generation_prompt:
        segments += _generation_prompt(open_message or {"role": "assistant"}, thinking=thinking)
    return segments


def _conversation(messages: Sequence[Message], *, thinking: bool) -> Iterator[Segment]:
    calls: Sequence[Message] = ()
    tool_index = 0
    for position, message in _tool_results_in_call_order(messages):
        match message["role"]:
            case "system" if message.get("tools"):
                yield from _system("tool-declare", _NEW_TOOLS_HEADER + _fenced(message["tools"]))
            case "system" | "user":
                yield from _message(message, _content(message))
            case "assistant":
                calls, tool_index = message.get("tool_calls") or (), 0
                yield from _message(message, _assistant(message, thinking=thinking))
            case "tool":
                tool_index += 1
                name = _result_name(message, calls, tool_index, position)
                header = open_tag(
                    "message", ("role", "tool"), ("tool", name), ("index", str(tool_index))
                )
                yield from [*header, *_content(message), *close_tag("message"), END_OF_MESSAGE]


def _message(message: Message, body: list[Segment]) -> list[Segment]:
    return [*_message_header(message), *body, *close_tag("message"), END_OF_MESSAGE]


def _message_header(message: Message) -> list[Segment]:
    name = [("name", message["name"])] if message.get("name") else []
    return open_tag("message", ("role", message["role"]), *name)


def _system(kind: str, body: str) -> list[Segment]:
    header = open_tag("message", ("role", "system"), ("type", kind))
    return [*header, *text(body.strip()), *close_tag("message"), END_OF_MESSAGE]


def _response_format(response_format: Mapping[str, Any] | None) -> list[Segment]:
    kind = response_format["type"] if response_format else "text"
    if kind == "text":
        return []
    body = _RESPONSE_FORMAT.format(kind)
    if response_format and kind == "json_schema":
        body += _RESPONSE_SCHEMA + _fenced(response_format["json_schema"]["schema"])
    return _system("response-format", body)


def _generation_prompt(partial: Message, *, thinking: bool) -> list[Segment]:
    """An open assistant message; `partial` is what it already says."""
    header, content = _message_header(partial), _content(partial)
    think = [*open_tag("think"), *text(_reasoning(partial))]
    if not thinking:
        return [*header, *open_tag("response"), *content]
    if not content:
        return [*header, *think]
    return [*header, *think, *close_tag("think"), *open_tag("response"), *content]


def _assistant(message: Message, *, thinking: bool) -> list[Segment]:
    segments: list[Segment] = []
    if thinking:
        # The channel is part of every turn, with or without reasoning in it.
        segments += [*open_tag("think"), *text(_reasoning(message)), *close_tag("think")]
    segments += [*open_tag("response"), *_content(message), *close_tag("response")]
    if calls := message.get("tool_calls"):
        segments += open_tag("tools")
        for index, call in enumerate(calls, start=1):
            segments += _call(call["function"], index)
        segments += close_tag("tools")
    return segments


def _reasoning(message: Message) -> str:
    reasoning: str = message.get("reasoning_content") or message.get("reasoning") or ""
    return reasoning if reasoning.strip() else ""


def _content(message: Message) -> list[Segment]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return text(content or "")
    return [segment for part in content for segment in text(part["text"])]


def _call(function: Mapping[str, Any], index: int) -> list[Segment]:
    segments = open_tag("call", ("tool", function["name"]), ("index", str(index)))
    arguments = _arguments(function.get("arguments"))
    if isinstance(arguments, str):
        segments += [*open_tag("json", ("type", "object")), *text(arguments), *close_tag("json")]
    else:
        for key, value in arguments.items():
            segments += open_tag("argument", ("key", key), ("type", _json_type(value)))
            raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            segments += [*text(raw), *close_tag("argument")]
    return [*segments, *close_tag("call")]


def _arguments(arguments: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """A call's arguments as an object; text that is no JSON object is returned as it is.

    The model can have written such text itself, so a later turn must not refuse it.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
    return "array"


def _fenced(value: object) -> str:
    # sort_keys sorts at every depth.
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"```json\n{compact}\n```"


def _tool_results_in_call_order(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Messages with their positions; each run of tool results sorted to the order of the calls.

    A result's name becomes that of its call. A run with a result of no known call is left as it is.
    """
    calls: Mapping[str, tuple[int, str]] = {}
    run: list[tuple[int, Message]] = []
    for position, message in enumerate(messages):
        if message["role"] == "tool":
            run.append((position, message))
            continue
        yield from _sorted_run(run, calls)
        run = []
        if message["role"] == "assistant":
            calls = _calls_by_id(message)
        yield position, message
    yield from _sorted_run(run, calls)


def _calls_by_id(message: Message) -> Mapping[str, tuple[int, str]]:
    """Call id to order and name; the first of two calls with one id counts."""
    calls: dict[str, tuple[int, str]] = {}
    for order, call in enumerate(message.get("tool_calls") or ()):
        if call.get("id") is not None:
            calls.setdefault(call["id"], (order, call["function"]["name"]))
    return calls


def _sorted_run(
    run: list[tuple[int, Message]], calls: Mapping[str, tuple[int, str]]
) -> Iterator[tuple[int, Message]]:
    if any(message["tool_call_id"] not in calls for _, message in run):
        yield from run
        return
    for position, message in sorted(run, key=lambda item: calls[item[1]["tool_call_id"]][0]):
        yield position, {**message, "tool": calls[message["tool_call_id"]][1]}


def _result_name(message: Message, calls: Sequence[Message], tool_index: int, position: int) -> str:
    name: str | None = message.get("tool") or message.get("name")
    if name is None and tool_index <= len(calls):
        name = calls[tool_index - 1]["function"]["name"]
    if name is None:
        raise RequestError(
            f"messages[{position}].tool_call_id",
            f"{message['tool_call_id']!r} matches no call of an earlier assistant message; "
            "send that message first, or name the tool in `name`",
        )
    return name
