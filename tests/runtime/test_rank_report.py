"""What ranks report before they load: equal on all of them, and different where it matters."""

import shutil

import pytest
import torch

from tercel.config import EngineConfig
from tercel.errors import ConfigError
from tercel.runtime.checkpoint import open_files
from tercel.runtime.rank_agreement import check_agreement, name_ranks
from tercel.runtime.rank_report import report_of
from tercel.runtime.tokenizer import byte_tokens, write_rank_file
from tercel.weights.tiny import tiny_config
from tercel.weights.write import write_random_checkpoint
from tests.runtime.test_checkpoint import SMALL


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokens = byte_tokens()
    write_random_checkpoint(path, tiny_config("kimi_k3", len(tokens) + 256, changes=SMALL))
    write_rank_file(path / "tiktoken.model", tokens)
    return path


def report(model_dir, rank=0, layout="tp2_pp2", **options):
    torch.set_num_threads(1)
    config = EngineConfig(model=str(model_dir), layout=layout, page_size=8, **options)
    opened = open_files(config, local_rank=rank)
    return report_of(opened, opened.plan(rank))


def differences(one, other):
    return {name for name in one if one[name] != other[name]}


def test_every_rank_reports_the_same(model_dir):
    reports = {rank: report(model_dir, rank, num_threads=rank + 1) for rank in range(4)}
    check_agreement(reports)
    assert "config.layout" in reports[0] and "config.model" not in reports[0]


def test_what_differs_is_named(model_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    usual = report(model_dir)
    assert differences(usual, report(copy)) == set()
    write_random_checkpoint(
        copy, tiny_config("kimi_k3", len(byte_tokens()) + 256, changes=SMALL), seed=1
    )
    assert differences(usual, report(copy)) == {"checkpoint"}
    write_rank_file(copy / "tiktoken.model", byte_tokens()[::-1])
    assert differences(usual, report(copy)) == {"checkpoint", "tokenizer"}
    assert differences(usual, report(model_dir, mode="off")) == {"config.mode"}
    assert "program" in differences(usual, report(model_dir, layout="tp1_pp2"))


def test_disagreements_list_fields_and_ranks():
    reports = {0: {"a": "1", "b": "x"}, 1: {"a": "1", "b": "y"}, 2: {"a": "1", "b": "x", "c": "z"}}
    with pytest.raises(ConfigError) as caught:
        check_agreement(reports)
    text = str(caught.value)
    assert "  b: x on ranks 0, 2; y on rank 1" in text
    assert "  c: nothing on ranks 0-1; z on rank 2" in text
    assert "  a:" not in text


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
