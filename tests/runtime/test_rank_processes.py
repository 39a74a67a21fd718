"""Ranks as real processes over gloo: texts of one rank, deaths, and other checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tercel.config import SamplingParams
from tercel.errors import EngineError
from tercel.parallel.launch import local_members
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import byte_tokens, write_rank_file
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint
from tests.runtime.test_checkpoint import GREEDY, PROMPTS, SMALL
from tests.runtime.test_process import wait_until_gone

pytestmark = pytest.mark.slow

OPTIONS = {"cache_tokens": 512, "page_size": 8, "max_running": 4, "seed": 1, "num_threads": 1}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokens = byte_tokens()
    write_random_checkpoint(path, tiny_config("kimi_k3", len(tokens) + 256, changes=SMALL))
    write_rank_file(path / "tiktoken.model", tokens)
    return path


def test_texts_are_those_of_one_rank_until_a_rank_is_killed(model_dir):
    with LLM(model_dir, **OPTIONS) as llm:
        expected = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    with LLM(model_dir, **OPTIONS, layout="tp2") as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
        calls = llm.engine.stats().program_calls
        assert calls["embedding:embedding:portable"] > 0
        pids = [process.pid for process in llm.engine._runner._processes.values()]
        stream = llm.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True), stream=True)
        next(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^rank 1 ended \(SIGKILL"):
            for _ in stream:
                pass
        for pid in pids:
            wait_until_gone(pid)


def command(model, rank, port, *options):
    """`tercel generate` as a launcher with Open MPI's variables starts it."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = dict(zip(names, (rank, 2, rank, 2), strict=True))
    environment = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    settings = [
        f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "seed"
    ]
    arguments = ["generate", str(model), "hello", "--raw", "--json", "--temperature=0", *settings]
    return subprocess.Popen(
        [sys.executable, "-m", "tercel", *arguments, "--layout=tp2", "--max-tokens=4", *options],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "MASTER_PORT": str(port), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_launched_rank_with_another_checkpoint_and_configuration(model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    shard = next(other.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    port = local_members(2)[0].port
    ranks = [command(model_dir, 0, port), command(other, 1, port, "--mode=off")]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    message = outputs[0][1]
    assert "the ranks do not agree, and no weights were read" in message
    assert "config.mode: auto on rank 0; off on rank 1" in message
    assert "\n  checkpoint: " in message and "Traceback" not in message
