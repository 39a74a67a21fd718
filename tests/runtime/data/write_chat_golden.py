"""Writes chat_golden.json with the published K3 encoder, as nemo-automodel 0.7.0 ships it.

That code is under the Kimi K3 licence and is not part of this repository. To run this script:

    pip download nemo-automodel==0.7.0 --no-deps && unzip nemo_automodel-0.7.0-*.whl
    pip install 'transformers<5' tiktoken
    python write_chat_golden.py nemo_automodel/components/models/kimi_k3
"""

import base64
import importlib
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path

WORDS = [" role", '="', "message", "assistant", "think", "response", "user", "system", "\n\n"]
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    254: "[UNK]",
    255: "[PAD]",
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "finds »everything« <|sep|>",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
CALC = {"type": "function", "function": {"name": "calc"}}
HI = {"role": "user", "content": "hi"}


def call(call_id: str, name: str, arguments: object) -> dict:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


ALL_TYPES = {
    "s": 'a "b" & <|close|>argument<|sep|>',
    "n": -1.5,
    "i": 7,
    "b": True,
    "x": None,
    "o": {"k": ["ü", 1]},
    "l": [1, "two"],
    'odd "key" &': "",
}

CASES = [
    {"messages": [HI]},
    {"messages": [HI], "thinking": False},
    {"messages": [HI], "effort": "low", "add_generation_prompt": False},
    {"messages": [HI], "effort": None},
    {
        "messages": [
            {"role": "system", "content": "Be brief.", "name": 'the "boss" & co'},
            {"role": "developer", "content": "never rendered"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one ", "two")]},
            {"role": "assistant", "content": "ok", "reasoning": " 12345 汉字, don't 🙂\n\n"},
            {"role": "user", "content": "<|open|>think<|sep|>[EOS]<|end_of_msg|>"},
            {"role": "assistant", "content": None, "reasoning_content": " \n "},
            HI,
        ]
    },
    {
        "messages": [
            HI,
            {
                "role": "assistant",
                "reasoning_content": "call both",
                "content": "",
                "tool_calls": [
                    call("a", "search", json.dumps(ALL_TYPES)),
                    call("b", "calc", '{"cut": '),
                    call("c", "calc", ""),
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "third"},
            {"role": "tool", "tool_call_id": "a", "content": "first", "name": "stale"},
            {"role": "tool", "tool_call_id": "b", "content": "second"},
        ],
        "tools": [SEARCH, CALC],
        "tool_choice": "required",
    },
    {
        "messages": [
            HI,
            {"role": "assistant", "content": "", "tool_calls": [call("a", "calc", {"q": "1"})]},
            {"role": "tool", "tool_call_id": "unknown", "content": "by position"},
            {"role": "tool", "tool_call_id": "unknown", "content": "by name", "name": "other"},
            {"role": "system", "tools": [SEARCH]},
            HI,
        ],
        "thinking": False,
        "tool_choice": "none",
    },
    {
        "messages": [
            {"role": "assistant", "tool_calls": [call("a", "calc", {}), call("a", "search", {})]},
            {"role": "tool", "tool_call_id": "a", "content": "of the first call with this id"},
        ]
    },
    {"messages": [HI], "response_format": {"type": "json_object"}},
    {
        "messages": [HI],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "a": [{"z": 1, "b": "ü"}]}},
        },
    },
]


def base_tokens() -> list[bytes]:
    prefixes = [word[:end].encode() for word in WORDS for end in range(2, len(word) + 1)]
    return [bytes([byte]) for byte in range(256)] + list(dict.fromkeys(prefixes))


def main(source: Path) -> None:
    package = types.ModuleType("kimi_k3")
    package.__path__ = [str(source)]
    sys.modules["kimi_k3"] = package
    tokenization = importlib.import_module("kimi_k3.tokenization")
    tokens = base_tokens()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiktoken.model")
        path.write_text("".join(lines))
        tokenizer = tokenization.TikTokenTokenizer(
            str(path),
            unk_token="[UNK]",
            pad_token="[PAD]",
            added_tokens_decoder={
                len(tokens) + slot: tokenization.AddedToken(name) for slot, name in NAMED.items()
            },
        )
    cases = [{"request": case, "ids": encode(tokenizer, case)} for case in CASES]
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "tiktoken")}
    golden = {
        "source": "nemo-automodel 0.7.0, kimi_k3/encoding.py and tokenization.py",
        "versions": versions,
        "merges": [token.decode() for token in tokens[256:]],
        "cases": cases,
    }
    target = Path(__file__).with_name("chat_golden.json")
    rows = ",\n".join(f"  {json.dumps(case, ensure_ascii=False)}" for case in cases)
    head = json.dumps({**golden, "cases": []}, ensure_ascii=False)
    target.write_text(f"{head[:-2]}\n{rows}\n]}}\n", encoding="utf-8")


def encode(tokenizer: object, case: dict) -> list[int]:
    request = {"add_generation_prompt": True, **case}
    messages = request.pop("messages")
    request["thinking_effort"] = request.pop("effort", "max")
    return tokenizer.apply_chat_template(messages, tokenize=True, **request)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
