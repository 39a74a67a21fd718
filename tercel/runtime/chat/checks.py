"""What a chat request may contain. Each refusal is a RequestError that names the field."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tercel.errors import RequestError

EFFORTS = ("low", "medium", "high", "max")
_TOOL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,255}")


def check_request(
    messages: object,
    tools: object,
    effort: object,
    tool_choice: object,
    response_format: object,
) -> None:
    """Checks everything that `render` reads.

    Raises:
        RequestError: the first field that is wrong.
    """
    names: dict[str, str] = {}
    _check_tools(tools, "tools", names)
    _check_messages(messages, names)
    if effort is not None and effort not in EFFORTS:
        raise RequestError("reasoning_effort", f"{effort!r} is unknown; use one of {EFFORTS}")
    _check_tool_choice(tool_choice, has_tools=bool(names))
    _check_response_format(response_format)


def _check_messages(messages: object, tool_names: dict[str, str]) -> None:
    items = _sequence(messages, "messages")
    if not items:
        raise RequestError("messages", "the list is empty; send at least one message")
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        message = _mapping(item, where)
        _string(message.get("role"), f"{where}.role")
        _optional_string(message.get("name"), f"{where}.name")
        _check_content(message.get("content"), f"{where}.content")
        _check_dynamic_tools(message, where, tool_names)
        _check_partial(message, where, is_last=index == len(items) - 1)
        if message["role"] == "assistant":
            _check_assistant(message, where)
        elif message["role"] == "tool":
            _string(message.get("tool_call_id"), f"{where}.tool_call_id")
            _optional_string(message.get("tool"), f"{where}.tool")


def _check_content(content: object, field: str) -> None:
    if content is None or isinstance(content, str):
        return
    for index, item in enumerate(_sequence(content, field)):
        part = _mapping(item, f"{field}[{index}]")
        kind = part.get("type")
        if kind != "text":
            raise RequestError(
                f"{field}[{index}].type",
                f"{kind!r} parts are not supported; only text parts are (no images, audio, files)",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{field}[{index}].text", "a text part needs a string")


def _check_dynamic_tools(
    message: Mapping[str, Any], where: str, tool_names: dict[str, str]
) -> None:
    if message.get("tools") is None:
        return
    if message["role"] != "system":
        raise RequestError(
            f"{where}.tools",
            f"{message['role']!r} messages cannot carry tools; use a system message",
        )
    if message["tools"] and message.get("content"):
        raise RequestError(
            f"{where}.content",
            "a system message carries tools or content, not both; send two messages",
        )
    _check_tools(message["tools"], f"{where}.tools", tool_names)


def _check_partial(message: Mapping[str, Any], where: str, *, is_last: bool) -> None:
    partial = message.get("partial")
    if partial is None or partial is False:
        return
    field = f"{where}.partial"
    if partial is not True:
        raise RequestError(field, f"{partial!r} is not a boolean")
    if message["role"] != "assistant" or not is_last:
        raise RequestError(field, "only the last message, of role assistant, can be continued")
    if message.get("tool_calls"):
        raise RequestError(field, "a message with tool_calls cannot be continued; leave them out")


def _check_assistant(message: Mapping[str, Any], where: str) -> None:
    _optional_string(message.get("reasoning_content"), f"{where}.reasoning_content")
    _optional_string(message.get("reasoning"), f"{where}.reasoning")
    if message.get("tool_calls") is None:
        return
    for index, item in enumerate(_sequence(message["tool_calls"], f"{where}.tool_calls")):
        field = f"{where}.tool_calls[{index}]"
        call = _mapping(item, field)
        _optional_string(call.get("id"), f"{field}.id")
        function = _mapping(call.get("function"), f"{field}.function")
        _string(function.get("name"), f"{field}.function.name")
        arguments = function.get("arguments")
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            raise RequestError(
                f"{field}.function.arguments",
                f"{type(arguments).__name__} is not a JSON string or an object",
            )


def _check_tools(tools: object, field: str, names: dict[str, str]) -> None:
    """`names`: the field that declared each name so far; grows by these tools."""
    if tools is None:
        return
    for index, item in enumerate(_sequence(tools, field)):
        where = f"{field}[{index}]"
        tool = _mapping(item, where)
        if tool.get("type") != "function":
            raise RequestError(f"{where}.type", f"{tool.get('type')!r} is unknown; use 'function'")
        function = _mapping(tool.get("function"), f"{where}.function")
        name = _string(function.get("name"), f"{where}.function.name")
        if not _TOOL_NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name",
                f"{name[:80]!r} must start with a letter, go on with letters, digits, _ or -, "
                "and have at most 256 characters",
            )
        if name in names:
            raise RequestError(
                f"{where}.function.name", f"{name!r} is already declared by {names[name]}"
            )
        if function.get("parameters") is not None:
            _mapping(function["parameters"], f"{where}.function.parameters")
        names[name] = where


def _check_tool_choice(tool_choice: object, *, has_tools: bool) -> None:
    if tool_choice not in (None, "auto", "none", "required"):
        raise RequestError(
            "tool_choice", f"{tool_choice!r} is not supported; use 'auto', 'none' or 'required'"
        )
    if tool_choice == "required" and not has_tools:
        raise RequestError("tool_choice", "'required' needs tools; declare at least one")


def _check_response_format(response_format: object) -> None:
    if response_format is None:
        return
    kind = _mapping(response_format, "response_format").get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            "response_format.type",
            f"{kind!r} is unknown; use 'text', 'json_object' or 'json_schema'",
        )
    if kind == "json_schema":
        field = "response_format.json_schema"
        spec = _mapping(_mapping(response_format, "response_format").get("json_schema"), field)
        _string(spec.get("name"), f"{field}.name")
        _mapping(spec.get("schema"), f"{field}.schema")
        if not isinstance(spec.get("strict", True), bool):
            raise RequestError(f"{field}.strict", f"{spec['strict']!r} is not a boolean")


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(field, f"an object is needed, found {_kind(value)}")
    return value


def _sequence(value: object, field: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise RequestError(field, f"an array is needed, found {_kind(value)}")
    return value


def _string(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(field, f"a non-empty string is needed, found {_kind(value)}")
    return value


def _optional_string(value: object, field: str) -> None:
    if not (value is None or isinstance(value, str)):
        raise RequestError(field, f"a string is needed, found {_kind(value)}")


def _kind(value: object) -> str:
    return "nothing" if value is None else "''" if value == "" else type(value).__name__
