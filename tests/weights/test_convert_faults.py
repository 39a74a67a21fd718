"""Conversions that cannot end: a clear error, and nothing is left behind."""

import json
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tercel.cli import main
from tercel.errors import CheckpointError, ConfigError
from tercel.weights import convert
from tercel.weights.convert import convert_checkpoint
from tests.weights.test_changed_files import replace, rewrite, truncate

ROOT = Path(__file__).parents[2]


def left(tmp_path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


@contextmanager
def largest_file(num_bytes: int):
    """No file may grow beyond this: writing fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [10, 100_000, 700_000], ids=["header", "first", "later"])
def test_disk_full(kimi_k3, tmp_path, limit):
    before = {path.name: path.read_bytes() for path in kimi_k3.path.iterdir()}
    with largest_file(limit), pytest.raises(CheckpointError) as caught:
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert "File too large" in str(caught.value) and "nothing was written" in str(caught.value)
    assert str(tmp_path / "out") in str(caught.value)
    assert left(tmp_path) == ["model"]
    assert {path.name: path.read_bytes() for path in kimi_k3.path.iterdir()} == before
    convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")  # with room it goes through


def test_disk_full_while_a_random_checkpoint_is_made(tmp_path, capsys):
    with largest_file(10_000):
        code, _, err = run(capsys, "checkpoint", "make-tiny", tmp_path / "deep" / "out")
    assert code == 1 and err.startswith("error: ") and "nothing was written" in err
    assert left(tmp_path) == ["deep"] and not left(tmp_path / "deep")


def test_disk_full_while_other_files_are_copied(kimi_k3, tmp_path):
    (kimi_k3.path / "tiktoken.model").write_bytes(bytes(5_000_000))
    with largest_file(3_000_000), pytest.raises(CheckpointError, match="nothing was written"):
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert left(tmp_path) == ["model"]


def test_too_little_room_is_seen_before_anything_is_written(kimi_k3, tmp_path, monkeypatch):
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(convert, "shutil", usage)
    with pytest.raises(CheckpointError, match=r"needs [0-9,]+ bytes and its disk has 1,000 free"):
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize("at", [0, 0.5, 1], ids=["at the start", "half-way", "at the end"])
@pytest.mark.parametrize("change", [rewrite, replace, truncate])
@pytest.mark.parametrize("which", [0, 2], ids=["first shard", "last shard"])
def test_source_changes(kimi_k3, tmp_path, change, at, which):
    shard, changed = kimi_k3.shards[which], []

    def progress(done: int, total: int) -> None:
        if not changed and done >= at * total:
            changed.append(done)
            change(shard)

    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16", progress=progress)
    assert changed and str(caught.value).startswith(f"{shard}: changed while")
    assert left(tmp_path) == ["model"]


def test_source_ends_inside_a_tensor(kimi_k3, tmp_path, monkeypatch):
    """Cut after the look at the file: an error, where reading a mapping would end the process."""
    monkeypatch.setattr("tercel.weights.reader.Reader._check", lambda self, shard: None)
    with pytest.raises(CheckpointError, match="ends inside language_model"):
        convert_checkpoint(
            kimi_k3.path,
            tmp_path / "out",
            "bf16",
            progress=lambda done, total: truncate(kimi_k3.shards[2]),
        )
    assert left(tmp_path) == ["model"]


def test_ctrl_c(kimi_k3, tmp_path):
    def progress(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16", progress=progress)
    assert left(tmp_path) == ["model"]


SLOWLY = """
import sys, time
from contextlib import nullcontext
from tercel.cli import checkpoint, main

checkpoint.loading_bar = lambda text: nullcontext(lambda done, total: time.sleep(0.1))
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def converting(source, out):
    """The command itself, while it writes."""
    command = [sys.executable, "-c", SLOWLY, "checkpoint", "convert"]
    command += [str(source), str(out), "--to", "bf16"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(out.parent.glob(f".{out.name}.*/*.safetensors")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(kimi_k3, tmp_path, number):
    with converting(kimi_k3.path, tmp_path / "out") as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert left(tmp_path) == ["model"]


def test_the_next_conversion_removes_what_a_kill_left(kimi_k3, tmp_path):
    others = tmp_path / ".other.1234.partial", tmp_path / ".out.partial"
    for other in others:
        other.mkdir()
    with converting(kimi_k3.path, tmp_path / "out") as process:
        with pytest.raises(ConfigError, match=r"another process makes .*\.out\."):
            convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
        process.kill()
        process.wait()
        assert len(left(tmp_path)) == 4
    convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert left(tmp_path) == sorted(["model", "out", *(other.name for other in others)])


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_command(capsys, originals, tmp_path):
    source = originals["kimi_k3"].path
    command = ("checkpoint", "convert", source)
    code, text, err = run(capsys, *command, tmp_path / "a", "--to", "nvfp4", "--json")
    assert (code, err) == (0, "")
    seen = json.loads(text)
    assert seen["model"] == str(tmp_path / "a") and seen["to"] == "nvfp4"
    assert seen["exactness"] == [
        {
            "kind": "routed experts",
            "source": "mxfp4",
            "target": "nvfp4",
            "matrices": 60,
            "inexact_matrices": 0,
            "values": 60 * 128 * 128,
            "inexact_values": 0,
            "worst_error": 0.0,
            "worst_rms_error": 0.0,
        }
    ]
    code, text, err = run(capsys, *command, tmp_path / "b", "--to", "nvfp4", "--fp8-attention")
    assert (code, err) == (0, "")
    assert "routed experts, mxfp4 to nvfp4: 60 matrices, all 983,040 values exact" in text
    assert "attention projections, plain to fp8_block: 42 matrices, 42 of them not exact" in text
    assert run(capsys, "checkpoint", "inspect", tmp_path / "b")[0] == 0
    code, _, err = run(capsys, *command, tmp_path / "b", "--to", "bf16")
    assert code == 1 and "exists and is not an empty directory" in err
    assert run(capsys, *command, tmp_path / "c")[0] == 2
