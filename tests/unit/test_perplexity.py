import json
import math
import shutil

import pytest

from tercel.core.model import read_config_json
from tercel.errors import CheckpointError, ConfigError
from tercel.gates.perplexity import gsm8k_perplexity
from tercel.runtime.tokenizer import RANK_FILE, byte_tokens, write_rank_file
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint

LINES = [
    {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "How many apples does Tom have now?", "answer": "He has 7.\nAnd 1.\n#### 1,008"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config("kimi_k3", len(byte_tokens()) + 256, changes={"num_hidden_layers": 2})
    write_random_checkpoint(directory, config, num_shards=1, seed=0)
    write_rank_file(directory / RANK_FILE, byte_tokens())
    return directory


def measure(model_dir, tmp_path, lines):
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return gsm8k_perplexity(model_dir, file, lambda done, total: None)


def test_a_random_model_knows_nothing(model_dir, tmp_path):
    vocab_size = read_config_json(model_dir)["text_config"]["vocab_size"]
    assert vocab_size / 2 < measure(model_dir, tmp_path, LINES) < vocab_size * 2


def test_padding_changes_nothing(model_dir, tmp_path):
    """Together, the lines weigh as much as their answers are long."""
    short, long = (math.log(measure(model_dir, tmp_path, [line])) for line in LINES)
    together = math.log(measure(model_dir, tmp_path, LINES))
    share = (together - short) / (long - short)
    again = math.log(measure(model_dir, tmp_path, [LINES[0], *LINES]))
    share_again = (again - short) / (long - short)
    # One more short answer: 1 / share grows by n_short / n_long.
    assert 0.5 < share < 1
    assert 1 / share_again - 1 / share == pytest.approx(1 / share - 1, rel=1e-3)


def test_wrong_files(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"gsm8k: .*missing"):
        gsm8k_perplexity(model_dir, tmp_path / "missing", lambda done, total: None)
    with pytest.raises(ConfigError, match="JSON lines"):
        measure(model_dir, tmp_path, [{"question": "How many?"}])
    for name in ("config.json", RANK_FILE):
        shutil.copy(model_dir / name, tmp_path / name)
    with pytest.raises(CheckpointError, match="lacks"):
        measure(tmp_path, tmp_path, LINES)
