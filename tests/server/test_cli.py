"""The commands, with a scripted model in place of a checkpoint."""

import inspect
import io
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import tercel.cli.serve
from tercel import __version__
from tercel.cli import COMMANDS, main
from tercel.cli.options import field_docs
from tercel.config import EngineConfig, SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import Segment, encode
from tercel.runtime.chat.segments import open_tag
from tests.runtime.fakes import TOKENIZER, open_fake
from tests.server.fakes import message

ROOT = Path(__file__).parents[2]
PROMPT_END = encode(TOKENIZER, [*open_tag("message", ("role", "assistant")), *open_tag("think")])
RAW = "raw:"


def scripted(reply: Callable[[str], list[Segment]]) -> Callable[..., int]:
    """Draws what `reply` says to a chat prompt; behind any other prompt, `RAW` and the end."""

    def draw(history: list[int], seed: int, vocab_size: int) -> int:
        starts = [
            start + len(PROMPT_END)
            for start in range(len(history))
            if history[start : start + len(PROMPT_END)] == PROMPT_END
        ]
        if not starts:
            written = TOKENIZER.decode(history).partition(RAW)[2]
            return TOKENIZER.encode("!")[0] if len(written) < 3 else TOKENIZER.eos_id
        # The first one inside which the output has not ended.
        start = starts[-1]
        ids = encode(TOKENIZER, reply(TOKENIZER.decode(history[:start])))
        return ids[len(history) - start]

    return draw


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the model of every command says."""
    import tercel.runtime.llm

    real = tercel.runtime.llm.LLM

    def use(reply: Callable[[str], list[Segment]]) -> None:
        open_model = partial(open_fake, max_position_embeddings=4096, draw=scripted(reply))
        monkeypatch.setattr(tercel.runtime.llm, "LLM", partial(real, open_model=open_model))

    return use


def echo(prompt: str) -> list[Segment]:
    """Answers with the number of user messages, and repeats the last one."""
    last = prompt.rpartition('role="user"<|sep|>')[2].partition("<|close|>")[0]
    return message(f"{prompt.count('role=' + chr(34) + 'user')}: {last}", "hm")


def test_version_help_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tercel {__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and text in shown for name, text in COMMANDS.items())
    assert main(["nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["serve", "--page-size", "many", "x"]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    subcommand = {"gate": ["accuracy"], "checkpoint": ["inspect"]}.get(name, [])
    assert main([name, *subcommand, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_options_mirror_the_configuration() -> None:
    parameters = inspect.signature(tercel.cli.serve.serve).parameters
    for field in fields(EngineConfig):
        if field.name != "model":
            assert parameters[field.name].default == field.default
    for cls in (EngineConfig, SamplingParams):
        assert list(field_docs(cls)) == [field.name for field in fields(cls)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "missing"], "missing is not a directory"),
        (["serve", "."], "config.json is missing"),
        (["serve", ".", "--profile", "x"], "profile='x' is not built"),
        (["serve", ".", "--page-size", "48"], "cache_tokens=65536 must be a multiple"),
        (["generate", ".", "hi", "--temperature", "-1"], "temperature: -1"),
        (["generate", ".", ""], "prompt: it is empty"),
        (["gate", "accuracy", "--model", "missing", "--problems", "1"], "missing"),
    ],
)
def test_errors_are_one_message(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert words in captured.err
    assert captured.out == ""


def test_generate(llm: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    llm(echo)
    assert main(["generate", "nano", "hello"]) == 0
    assert capsys.readouterr().out == "thinking: hm\nanswer: 1: hello\n\n"
    assert main(["generate", "nano", "hello", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["content"], answer["reasoning_content"]) == ("1: hello", "hm")
    assert answer["finish_reason"] == "stop"
    assert main(["generate", "nano", "hello", "--max-tokens", "2", "--json"]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert (cut["finish_reason"], cut["completion_tokens"]) == ("length", 2)


def test_generate_raw_from_standard_input(
    llm: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm(echo)
    monkeypatch.setattr("sys.stdin", io.StringIO(RAW))
    assert main(["generate", "nano", "--raw"]) == 0
    assert capsys.readouterr().out == "!!!\n"
    assert main(["generate", "nano", RAW, "--raw", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("!!!", "stop")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_not_utf8(
    command: str,
    llm: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm(echo)
    raw = io.BytesIO(b"a \xff b\n")
    text = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", text)
    assert main([command, "nano"]) == 1
    assert "prompt: standard input is not UTF-8" in capsys.readouterr().err


def piped(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_chat_reads_a_pipe_turn_by_turn(
    llm: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm(echo)
    piped(monkeypatch, "one", "", "two", "/reset", "three", "/quit", "four")
    assert main(["chat", "nano"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    answers = [line for line in out.splitlines() if line.startswith("answer: ")]
    assert answers == ["answer: 1: one", "answer: 2: two", "answer: 1: three"]
    assert out.count("thinking: hm\n") == 3
    assert out.count("tokens/s, TTFT") == 3


def test_chat_json(
    llm: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm(echo)
    piped(monkeypatch, "one", "two")
    assert main(["chat", "nano", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [turn["content"] for turn in turns] == ["1: one", "2: two"]
    assert all(turn["tokens_per_s"] > 0 and turn["ttft_s"] >= 0 for turn in turns)


def test_chat_in_a_terminal(
    llm: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C stops one answer, an error leaves the conversation, the end of input ends it."""
    interrupts = [KeyboardInterrupt()]

    def reply(prompt: str) -> list[Segment]:
        if "stop" in prompt and interrupts:
            raise interrupts.pop()
        return echo(prompt)

    lines = iter(["one", "stop", "x" * 5000, "two"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    llm(reply)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "nano"]) == 0
    captured = capsys.readouterr()
    assert "answer: 1: one" in captured.out
    assert "stopped" in captured.out
    assert captured.err.startswith("error: prompt: ")
    assert "answer: 2: two" in captured.out


def test_gate_accuracy(llm: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    problems = {problem.question: problem.answer for problem in islice(generate(5), 4)}
    wrong = next(iter(problems))

    def solve(prompt: str) -> list[Segment]:
        question, answer = next(item for item in problems.items() if item[0] in prompt)
        return message(f"The answer is {answer + (question == wrong)}.", "so")

    llm(solve)
    arguments = "gate accuracy --model nano --problems 4 --held-out 0 --calculator 0 --seed 5"
    assert main([*arguments.split(), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["exact_match"] == 0.75
    assert [each["question"] for each in result["wrong"]] == [wrong]
    assert main([*arguments.split(), "--at-least", "0.8"]) == 1
    captured = capsys.readouterr()
    assert "trained templates" in captured.out and "75.0%" in captured.out
    assert "below 80.0%" in captured.err


def test_a_port_in_use_ends_serve_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"error: 127.0.0.1:{port} is in use; stop the other server or choose another --port\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_ends_with_the_code_of_its_signal(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercel.server.run.run", lambda *_, **__: number)
    assert main(["serve", str(ROOT / "checkpoints/nano"), "--port", "0"]) == code
