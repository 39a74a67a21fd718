"""Conversions between formats: values, bytes, what is reported, and what the result is."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.core.model import ModelConfig
from tercel.errors import CheckpointError, ConfigError
from tercel.weights.checkpoint import INDEX, Checkpoint
from tercel.weights.convert import convert_checkpoint
from tercel.weights.manifest import account, manifest_from_config
from tests.weights.conftest import Model
from tests.weights.loading import assert_same, flat, load

EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts."
VECTOR = Path(__file__).parents[1] / "vectors/kimi_k3"


@pytest.fixture(scope="module")
def made(originals, tmp_path_factory):
    """Conversions of the K3 checkpoint, each made once: made("nvfp4", "bf16") is two in a row."""
    base = tmp_path_factory.mktemp("converted")
    reports = {}

    def make(*steps: str) -> tuple[Model, object]:
        path = base / "-".join(steps)
        if not path.exists():
            source = originals["kimi_k3"] if len(steps) == 1 else make(*steps[:-1])[0]
            to, _, fp8 = steps[-1].partition("+")
            reports[path] = convert_checkpoint(source.path, path, to, fp8_attention=bool(fp8))
        return Model(path), reports[path]

    return make


EXACT = [
    ("nvfp4",),
    ("bf16",),
    ("nvfp4", "mxfp4"),
    ("nvfp4", "bf16"),
    ("bf16", "mxfp4"),
    ("bf16", "nvfp4"),
]
LOSSY = [("nvfp4+fp8",), ("nvfp4+fp8", "bf16"), ("nvfp4+fp8", "mxfp4")]


@pytest.mark.parametrize("steps", EXACT + LOSSY, ids="-".join)
def test_result_is_sound(made, steps):
    model, report = made(*steps)
    config = json.loads((model.path / "config.json").read_text())
    manifest, problems = account(Checkpoint.open(model.path), ModelConfig.load(model.path))
    assert problems == []
    declared = manifest_from_config(config)
    assert {(e.key, e.shape, e.dtype) for e in declared.entries} == {
        (e.key, e.shape, e.dtype) for e in manifest.entries
    }
    assert (report.tensors, report.num_bytes) == (manifest.num_tensors, manifest.num_bytes)
    assert model.index()["metadata"]["total_size"] == manifest.num_bytes
    assert not [path for path in model.path.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("steps", EXACT, ids="-".join)
@pytest.mark.parametrize("layout", ["tp1", "tp4_moetp2ep2"])
def test_exact_conversions_keep_every_value(originals, made, steps, layout):
    model, report = made(*steps)
    assert all(each.inexact_values == each.worst_error == 0 for each in report.exactness)
    rank = 3 if layout != "tp1" else 0
    got, want = (load(each, layout, rank, pack=True) for each in (model, originals["kimi_k3"]))
    assert_same(got, want)


def test_there_and_back_is_the_same_bytes(originals, made):
    assert_same_tensors(made("nvfp4", "mxfp4")[0].tensors(), originals["kimi_k3"].tensors())


def assert_same_tensors(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert torch.equal(bits(got[name]), bits(value)), name


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def test_closed_form(originals, made):
    """The published one: the same codes, a power of two over w1 and w3, halves that agree."""
    before, after = originals["kimi_k3"].tensors(), made("nvfp4")[0].tensors()
    for expert in range(4):
        at = f"{EXPERTS}{expert}."
        largest = {
            name: int(before[f"{at}{name}.weight_scale"].max()) - 127 for name in ("w1", "w2", "w3")
        }
        shared = max(largest["w1"], largest["w3"])
        for name, exponent in (("w1", shared), ("w3", shared), ("w2", largest["w2"])):
            matrix = f"{at}{name}."
            assert torch.equal(after[f"{matrix}weight"], before[f"{matrix}weight_packed"])
            assert float(after[f"{matrix}weight_scale_2"]) == 2.0 ** (exponent - 8)
            assert float(after[f"{matrix}input_scale"]) == 1.0
            k = before[f"{matrix}weight_scale"].float() - 127
            scale = after[f"{matrix}weight_scale"].float()
            for half in (scale[:, ::2], scale[:, 1::2]):
                assert torch.equal(half.log2() + exponent - 8, k)


def test_tensors_that_do_not_change_are_copied(originals, made):
    before = originals["kimi_k3"].tensors()
    for steps in (("nvfp4",), ("bf16",)):
        model, report = made(*steps)
        kept = {n: x for n, x in before.items() if ".experts." not in n}
        after = {n: x for n, x in model.tensors().items() if ".experts." not in n}
        assert_same_tensors(after, kept)
        assert report.copied_tensors == len(kept)
        assert report.copied_bytes == sum(x.nbytes for x in kept.values())


def test_shards_follow_the_source(originals, made):
    """A tensor stays in the file of its layer, as pipeline stages want it."""
    before, after = originals["kimi_k3"].index(), made("nvfp4")[0].index()
    assert len(made("nvfp4")[0].shards) == len(originals["kimi_k3"].shards)
    for name, file in after["weight_map"].items():
        if name in before["weight_map"] and ".experts." not in name:
            assert before["weight_map"][name] == file


def test_lossy_conversion_says_so(originals, made):
    _, report = made("nvfp4+fp8")
    attention, experts = report.exactness
    assert (experts.kind, experts.source, experts.target) == ("routed experts", "mxfp4", "nvfp4")
    assert experts.matrices == 5 * 4 * 3 and experts.values == 60 * 128 * 128
    assert experts.inexact_values == 0
    assert (attention.kind, attention.target) == ("attention projections", "fp8_block")
    assert attention.inexact_matrices == attention.matrices == 3 * 8 + 3 * 6
    assert 0.02 < attention.worst_error < 1 / 28 + 1e-6
    assert 0.02 < attention.worst_rms_error < 0.04
    before = originals["kimi_k3"].tensors()
    name = "language_model.model.layers.2.self_attn.q_b_proj.weight"
    weight, scale = (made("nvfp4+fp8")[0].tensors()[f"{name}{end}"] for end in ("", "_scale"))
    assert weight.dtype == torch.float8_e4m3fn and scale.shape == (6, 1, 1, 1)
    values = weight.float() * scale[:, 0, :, 0].repeat_interleave(128, 0)[:, :1]
    error = (values - before[name].float()).abs().max() / before[name].float().abs().max()
    assert float(error) <= attention.worst_error


def test_bf16_that_no_four_bits_hold(originals, made, tmp_path):
    """Random bf16 experts: both four-bit formats lose, by what four bits lose."""
    shutil.copytree(made("bf16")[0].path, tmp_path / "source")
    source = Model(tmp_path / "source")
    generator = torch.Generator().manual_seed(3)
    for shard in source.shards:
        rewrite(shard, lambda x: torch.randn(x.shape, generator=generator).bfloat16())
    for to, rms in (("mxfp4", 0.14), ("nvfp4", 0.11)):
        report = convert_checkpoint(source.path, tmp_path / to, to)
        (experts,) = report.exactness
        assert experts.inexact_matrices == experts.matrices == 60
        assert 0.5 * rms < experts.worst_rms_error < rms
        assert account(Checkpoint.open(tmp_path / to), ModelConfig.load(tmp_path / to))[1] == []
    scales = {
        (name.split(".w")[0], float(x))
        for name, x in Model(tmp_path / "nvfp4").tensors().items()
        if name.endswith(("w1.weight_scale_2", "w3.weight_scale_2"))
    }
    assert len(scales) == 20  # one for both


def rewrite(shard, change) -> None:
    tensors = load_file(shard)
    save_file({n: change(x) if ".experts." in n else x for n, x in tensors.items()}, shard)


def test_blocks_outside_the_window(kimi_k3, tmp_path):
    """One block far below the others loses its small values, and that is counted."""
    name = f"{EXPERTS}2.w1.weight_scale"
    kimi_k3.change(
        name, lambda x: x.index_put((torch.tensor([5]), torch.tensor([1])), x.max() - 40)
    )
    (experts,) = convert_checkpoint(kimi_k3.path, tmp_path / "out", "nvfp4").exactness
    assert experts.inexact_matrices == 1 and 0 < experts.inexact_values <= 32
    assert experts.worst_error < 2.0**-30
    (experts,) = convert_checkpoint(kimi_k3.path, tmp_path / "bf16", "bf16").exactness
    assert experts.inexact_values == 0


def test_w1_and_w3_in_different_files(kimi_k3, tmp_path):
    """Gate and up share a second scale wherever they lie."""
    w3 = {n: x for n, x in kimi_k3.tensors().items() if ".w3." in n}
    for name in w3:
        kimi_k3.change(name, lambda x: None)
    last = kimi_k3.shards[-1]
    save_file({**load_file(last), **w3}, last)
    kimi_k3.reindex()
    convert_checkpoint(kimi_k3.path, tmp_path / "out", "nvfp4")
    after = Model(tmp_path / "out").tensors()
    for expert in range(4):
        one, three = (after[f"{EXPERTS}{expert}.{w}.weight_scale_2"] for w in ("w1", "w3"))
        assert torch.equal(one, three)


def test_configs(originals, made):
    before = json.loads((originals["kimi_k3"].path / "config.json").read_text())
    declaration = before["text_config"].pop("quantization_config")
    nvfp4 = json.loads((made("nvfp4")[0].path / "config.json").read_text())
    quantization = nvfp4.pop("quantization_config")
    assert nvfp4 == before  # nothing else changes, and text_config declares nothing
    assert quantization["quant_method"] == "modelopt_mixed"
    layers = quantization["quantized_layers"]
    for prefix in ("language_model.model.", "model.", ""):
        for moe in ("block_sparse_moe", "mlp"):
            entry = layers[f"{prefix}layers.1.{moe}.experts"]
            assert entry == {"quant_algo": "NVFP4", "group_size": 16}
    assert "*self_attn*" in quantization["ignore"]
    hf = json.loads((made("nvfp4")[0].path / "hf_quant_config.json").read_text())
    assert hf["quantization"]["quantized_layers"] == layers
    with_fp8 = json.loads((made("nvfp4+fp8")[0].path / "config.json").read_text())
    layers = with_fp8["quantization_config"]["quantized_layers"]
    assert layers["layers.0.self_attn.in_proj_qkvgfab"] == {"quant_algo": "FP8_PB_WO"}
    assert "*self_attn*" not in with_fp8["quantization_config"]["ignore"]
    assert json.loads((made("bf16")[0].path / "config.json").read_text()) == before
    assert not (made("nvfp4", "bf16")[0].path / "hf_quant_config.json").exists()
    again = json.loads((made("nvfp4", "mxfp4")[0].path / "config.json").read_text())
    assert again["text_config"]["quantization_config"] == declaration


def test_other_files_come_along(kimi_k3, tmp_path):
    (kimi_k3.path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (kimi_k3.path / "link.json").symlink_to(kimi_k3.path / "config.json")
    report = convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert report.files == ("generation_config.json", "link.json", "tiktoken.model")
    assert (tmp_path / "out/tiktoken.model").read_bytes() == b"IQ== 0\n"
    assert not (tmp_path / "out/link.json").is_symlink()


def test_kimi_linear_to_four_bits_and_back(originals, tmp_path):
    for to in ("mxfp4", "nvfp4"):
        convert_checkpoint(originals["kimi_linear"].path, tmp_path / to, to)
        assert account(Checkpoint.open(tmp_path / to), ModelConfig.load(tmp_path / to))[1] == []
    convert_checkpoint(tmp_path / "mxfp4", tmp_path / "bf16", "bf16")
    got, want = (load(Model(tmp_path / name), pack=True) for name in ("bf16", "mxfp4"))
    assert_same(got, want)


def test_vector_of_the_repository(tmp_path):
    """The checkpoint that another library wrote: one file, no index."""
    for to in ("nvfp4", "bf16"):
        report = convert_checkpoint(VECTOR, tmp_path / to, to)
        assert [each.inexact_values for each in report.exactness] == [0]
        assert (tmp_path / to / INDEX).is_file()
        got, want = (load(Model(path), pack=True) for path in (tmp_path / to, VECTOR))
        assert_same(got, want)


def test_progress_ends_at_the_bytes(originals, tmp_path):
    calls = []
    report = convert_checkpoint(
        originals["kimi_k3"].path, tmp_path / "out", "nvfp4", progress=lambda *a: calls.append(a)
    )
    assert calls[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_values_that_are_not_finite(kimi_k3, tmp_path):
    kimi_k3.change(f"{EXPERTS}3.w2.weight_scale", lambda x: x.index_fill(0, torch.tensor(0), 255))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2: holds values that are not finite"):
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("int4", {}, "to: 'int4' is unknown; there is mxfp4, nvfp4, bf16"),
        ("mxfp4", {}, "is mxfp4 already"),
        ("bf16", {"fp8_attention": True}, "fp8-attention: is published with nvfp4 only"),
    ],
)
def test_refuses_formats(originals, tmp_path, to, options, message):
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(originals["kimi_k3"].path, tmp_path / "out", to, **options)
    assert list(tmp_path.iterdir()) == []


def test_refuses_targets(kimi_k3, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    cases = {
        kimi_k3.path: "is the source itself",
        kimi_k3.path / "inside": "lie in each other",
        kimi_k3.path.parent: "lie in each other",
        full: "exists and is not an empty directory",
        full / "file": "exists and is not an empty directory",
        tmp_path / "no" / "where": "is not a directory; create it first",
    }
    for target, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            convert_checkpoint(kimi_k3.path, target, "bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model"]
    link = tmp_path / "link"
    link.symlink_to(kimi_k3.path)
    with pytest.raises(ConfigError, match="is the source itself"):
        convert_checkpoint(kimi_k3.path, link, "bf16")


def test_an_empty_directory_is_taken(originals, tmp_path):
    (tmp_path / "out").mkdir()
    convert_checkpoint(originals["kimi_k3"].path, tmp_path / "out", "bf16")
    assert flat(load(Model(tmp_path / "out")))


def test_a_broken_source_is_reported_whole(kimi_k3, tmp_path):
    kimi_k3.change(f"{EXPERTS}0.w1.weight_scale", lambda x: None)
    with pytest.raises(CheckpointError, match="weight_scale: is missing"):
        convert_checkpoint(kimi_k3.path, tmp_path / "out", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
