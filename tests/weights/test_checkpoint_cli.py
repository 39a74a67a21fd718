import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tercel.cli import main
from tercel.cli.progress import loading_bar
from tercel.runtime.tokenizer import Tokenizer

DRAFTER = Path(__file__).parents[2] / "checkpoints/nano-dspark"


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_make_inspect(capsys, tmp_path, family):
    out = tmp_path / "tiny"
    made = run(capsys, "checkpoint", "make-tiny", out, "--family", family, "--shards", 3, "--json")
    code, text, err = run(capsys, "checkpoint", "inspect", out, "--json")
    assert (made[0], code, err) == (0, 0, "")
    seen = json.loads(text)
    assert seen["family"] == family and seen["shards"] == 3 and seen["problems"] == []
    for key in ("tensors", "bytes", "by_dtype"):
        assert seen[key] == json.loads(made[1])[key]
    config = json.loads((out / "config.json").read_text())
    tokenizer = Tokenizer.load(out)
    assert tokenizer.vocab_size == config.get("text_config", config)["vocab_size"]
    assert tokenizer.eos_id == config["eos_token_id"]
    assert tokenizer.pad_id == config["pad_token_id"]
    added = json.loads((out / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert added[str(tokenizer.eos_id)] == {"content": "<|end_of_msg|>", "special": True}


def test_make_tiny_is_reproducible_and_follows_its_options(capsys, tmp_path):
    def tensors(name, *options):
        command = ("checkpoint", "make-tiny", tmp_path / name, "--shards", 1, *options)
        assert run(capsys, *command)[0] == 0
        return load_file(next((tmp_path / name).glob("*.safetensors")))

    one, same = tensors("a"), tensors("b")
    other = tensors("c", "--seed", 1, "--set", "num_experts=8")
    head = "language_model.lm_head.weight"
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[head], other[head])
    assert sum(".experts." in name for name in one) == 5 * 16 * 6
    assert sum(".experts." in name for name in other) == 5 * 8 * 6


def test_size_and_shards(capsys, tmp_path):
    options = ("--size-bytes", 400_000_000, "--shards", 4, "--json")
    code, text, _ = run(capsys, "checkpoint", "make-tiny", tmp_path / "big", *options)
    sizes = [shard.stat().st_size for shard in (tmp_path / "big").glob("*.safetensors")]
    assert code == 0 and len(sizes) == 4
    assert json.loads(text)["bytes"] == pytest.approx(400_000_000, rel=0.05)
    assert max(sizes) < 1.2 * sum(sizes) / 4


def test_manifest_of_a_directory_and_by_name(capsys, originals):
    path = originals["kimi_k3"].path
    code, text, _ = run(capsys, "checkpoint", "manifest", "--model", path, "--tensors", "--json")
    listed = json.loads(text)
    assert code == 0 and listed["tensors"] == len(originals["kimi_k3"].tensors())
    assert {entry["key"] for entry in listed["entries"]} == originals["kimi_k3"].tensors().keys()
    code, text, _ = run(capsys, "checkpoint", "manifest", "--model", "kimi_linear_48b", "--json")
    assert code == 0 and json.loads(text)["model"] == "kimi_linear_48b"


def test_inspect_lists_problems_and_fails(capsys, kimi_k3):
    kimi_k3.add("surprise", torch.zeros(1))
    code, text, err = run(capsys, "checkpoint", "inspect", kimi_k3.path, "--json")
    assert code == 1 and err == ""
    assert json.loads(text)["problems"] == [
        {"file": kimi_k3.shards[0].name, "key": "surprise", "text": "is not a tensor of the model"}
    ]
    code, text, err = run(capsys, "checkpoint", "inspect", kimi_k3.path)
    assert code == 1 and "total" in text and "surprise: is not a tensor of the model" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["checkpoint", "inspect", "/nowhere"], 1, "error: model: /nowhere is not a directory"),
        (["checkpoint", "manifest", "--model", "kimi"], 1, "error: model: kimi is not a directory"),
        (["checkpoint", "make-tiny", "/proc"], 1, "is not an empty directory"),
        (["checkpoint", "make-tiny", "x", "--family", "llama"], 1, "family: 'llama' is unknown"),
        (["checkpoint", "make-tiny", "x", "--set", "experts"], 1, "expected KEY=VALUE"),
        (["checkpoint", "make-tiny", "x", "--set", "a.b=1"], 1, "has no object 'a'"),
        (["checkpoint", "make-tiny", "x", "--set", "extra=1"], 1, "extra=1 is unknown"),
        (["checkpoint", "make-tiny", "x", "--set", "num_hidden_layers=a"], 1, "num_hidden_layers"),
        (["checkpoint", "make-tiny", "/proc/x"], 1, "error: /proc/x: making a checkpoint failed"),
        (["checkpoint", "make-tiny", "x", "--shards", "0"], 2, "--shards"),
        (["checkpoint", "inspect"], 2, "Missing argument"),
        (
            ["checkpoint", "convert", "/no", "x", "--to", "bf16"],
            1,
            "source: /no is not a directory",
        ),
        (
            ["checkpoint", "convert", str(DRAFTER), "x", "--to", "bf16"],
            1,
            "nano-dspark is a drafter, which runs in bf16 and has no experts to convert; pass",
        ),
        (["no-such-command"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors(capsys, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = run(capsys, *arguments)
    assert got == code and message in " ".join(err.split())
    assert "Traceback" not in err and not list(tmp_path.iterdir())


def test_help_imports_no_command(capsys):
    code, text, _ = run(capsys, "--help")
    assert code == 0 and "checkpoint" in text


def test_loading_bar_is_silent_without_a_terminal(capsys):
    with loading_bar() as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
