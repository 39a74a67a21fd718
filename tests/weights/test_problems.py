import json
import os

import pytest
import torch

from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import CheckpointError
from tercel.weights.checkpoint import INDEX, Checkpoint
from tercel.weights.load import load_model
from tercel.weights.problems import Problem, raise_problems

LAYER = "language_model.model.layers.{}."
A_LOG = LAYER.format(0) + "self_attn.A_log"
Q_PROJ = LAYER.format(0) + "self_attn.q_proj.weight"
ROUTER = LAYER.format(1) + "block_sparse_moe.gate.weight"
CODES = LAYER.format(1) + "block_sparse_moe.experts.2.w1.weight_packed"
NORM = LAYER.format(5) + "input_layernorm.weight"


def error_of(model) -> str:
    checkpoint, config = Checkpoint.open(model.path), ModelConfig.load(model.path)
    cpu = torch.device("cpu")
    with pytest.raises(CheckpointError) as caught:
        load_model(checkpoint, config, Layout(), 0, dtype=torch.float32, device=cpu)
    return str(caught.value)


def only_problem(model) -> str:
    lines = [line for line in error_of(model).splitlines() if line.startswith("  ")]
    assert len(lines) == 1, lines
    return lines[0].strip()


def test_everything_is_reported_together(kimi_k3):
    kimi_k3.change(A_LOG, lambda x: x + 1)
    kimi_k3.change(Q_PROJ, lambda x: x[:-1].contiguous())
    kimi_k3.change(ROUTER, lambda x: x.double())
    kimi_k3.change(CODES, lambda x: None)
    kimi_k3.add(LAYER.format(1) + "mlp.extra.weight", torch.zeros(2))
    cut = kimi_k3.shard_of(NORM)
    os.truncate(cut, cut.stat().st_size - 10)
    index = kimi_k3.index()
    index["metadata"]["total_size"] += 1
    index["weight_map"]["language_model.ghost"] = kimi_k3.shards[0].name
    kimi_k3.write_index(index)
    text = error_of(kimi_k3)
    for expected in [
        f"{A_LOG}: its values past the first 4 are padding and must be zero",
        f"{Q_PROJ}: has shape [127, 64], expected [128, 64]",
        f"{ROUTER}: has dtype F64, expected BF16 or F32 or F16",
        f"{CODES}: is missing, layers.1.mlp.experts.w13 needs it",
        "layers.1.mlp.extra.weight: is not a tensor of the model",
        f"{cut.name}: truncated: ",
        "language_model.ghost: is missing, model.safetensors.index.json says it is here",
        "metadata.total_size is ",
        "8 problems",
        "quant_method 'compressed-tensors'",
    ]:
        assert expected in text, text


def test_missing_shard_hides_no_other_problem_and_reports_no_key_twice(kimi_k3):
    lost = kimi_k3.shard_of(CODES)
    kimi_k3.change(NORM, lambda x: x[:-1].contiguous())
    lost.unlink()
    text = error_of(kimi_k3)
    assert f"{lost.name}: is missing, {INDEX} names it" in text
    assert f"{NORM}: has shape [63]" in text
    assert "2 problems" in text


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "its header is cut or damaged (0 bytes in the file)"),
        (b"\xff" * 64, "its header is cut or damaged (64 bytes in the file)"),
        ((5).to_bytes(8, "little") + b"[1,2]", "its header is not valid"),
        (
            (65).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[2]}}'.ljust(65),
            "its header is not valid",
        ),
    ],
    ids=["empty", "garbage", "not an object", "no offsets"],
)
def test_damaged_header(kimi_k3, content, cause):
    shard = kimi_k3.shards[1]
    shard.write_bytes(content)
    assert only_problem(kimi_k3).startswith(f"{shard.name}: {cause}")


def rewrite_header(shard, change) -> None:
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    shard.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def test_header_whose_bytes_do_not_fit_the_shape(kimi_k3):
    rewrite_header(kimi_k3.shard_of(NORM), lambda header: header[NORM]["shape"].append(2))
    text = error_of(kimi_k3)
    assert f"{NORM}: the header is wrong: 128 bytes do not hold BF16 [64, 2]" in text


def test_header_with_an_unknown_dtype(kimi_k3):
    rewrite_header(kimi_k3.shard_of(NORM), lambda header: header[NORM].update(dtype="INT7"))
    assert f"{NORM}: the header is wrong: dtype INT7 is unknown" in error_of(kimi_k3)


def test_header_with_overlapping_tensors(kimi_k3):
    def shift(header):
        header[NORM]["data_offsets"] = [at - 2 for at in header[NORM]["data_offsets"]]

    rewrite_header(kimi_k3.shard_of(NORM), shift)
    assert "the header is wrong: data starts at " in error_of(kimi_k3)


def test_bytes_after_the_last_tensor(kimi_k3):
    with kimi_k3.shards[0].open("ab") as file:
        file.write(b"12345")
    assert only_problem(kimi_k3).startswith(f"{kimi_k3.shards[0].name}: 5 bytes after")


def test_duplicate_tensor(kimi_k3):
    elsewhere = next(shard for shard in kimi_k3.shards if shard != kimi_k3.shard_of(NORM))
    kimi_k3.add(NORM, torch.ones(64, dtype=torch.bfloat16), elsewhere, index=False)
    text = error_of(kimi_k3)
    assert f"{elsewhere.name}: {NORM}: is in more than one file" in text
    assert f"{elsewhere.name}: {NORM}: is here, but not according to {INDEX}" in text


def test_index_that_names_another_file(kimi_k3):
    index = kimi_k3.index()
    right = index["weight_map"][NORM]
    index["weight_map"][NORM] = kimi_k3.shards[0].name
    kimi_k3.write_index(index)
    text = error_of(kimi_k3)
    assert f"{kimi_k3.shards[0].name}: {NORM}: is missing" in text
    assert f"{right}: {NORM}: is here, but not according to {INDEX}" in text


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "is not a valid index"),
        ("[]", "is not a valid index"),
        ('{"weight_map": {"a": 1}}', "is not a valid index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "names a file outside the directory"),
    ],
)
def test_nonsense_index(kimi_k3, content, cause):
    (kimi_k3.path / INDEX).write_text(content)
    assert only_problem(kimi_k3).startswith(f"{INDEX}: {cause}")


def test_gap_in_numbered_shards_without_an_index(kimi_k3):
    (kimi_k3.path / INDEX).unlink()
    lost = kimi_k3.shards[1]
    lost.unlink()
    text = error_of(kimi_k3)
    assert f"1 problem:\n  {lost.name}: is missing, its siblings count it" in text


def test_numbered_shards_without_an_index_load(kimi_k3):
    (kimi_k3.path / INDEX).unlink()
    assert not Checkpoint.open(kimi_k3.path).problems


def test_mixed_expert_formats(kimi_k3):
    plain = CODES.replace("weight_packed", "weight")
    kimi_k3.add(plain, torch.zeros(128, 128))
    assert only_problem(kimi_k3).endswith(f"{plain}: is not a tensor of the model")


def test_short_A_log(kimi_k3):
    kimi_k3.change(A_LOG, lambda x: x[:3].contiguous())
    assert only_problem(kimi_k3).endswith("has shape [3], expected at least 4 values")


def test_A_log_of_another_shape_is_read(kimi_k3):
    """Padded, as stored by K3, or with the singleton dimensions of Kimi-Linear."""
    kimi_k3.change(A_LOG, lambda x: x[:4].view(1, 1, 4, 1).contiguous())
    assert not Checkpoint.open(kimi_k3.path).problems
    config, cpu = ModelConfig.load(kimi_k3.path), torch.device("cpu")
    model = load_model(
        Checkpoint.open(kimi_k3.path), config, Layout(), 0, dtype=torch.float32, device=cpu
    )
    assert torch.equal(model.layers[0].attention.A_log, kimi_k3.tensors()[A_LOG].flatten())


def test_long_lists_are_cut(tmp_path):
    problems = [Problem("a.safetensors", f"key{i}", "is missing") for i in range(33)]
    with pytest.raises(CheckpointError) as caught:
        raise_problems(tmp_path, problems)
    assert str(caught.value).count("key") == 20
    assert "33 problems" in str(caught.value) and "and 13 more" in str(caught.value)


def test_no_directory_and_no_files(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"^model: .* holds no safetensors file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"^drafter: .* holds no safetensors file"):
        Checkpoint.open(tmp_path, "drafter")
