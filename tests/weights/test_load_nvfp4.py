"""The NVFP4 checkpoint: experts in NVFP4, attention in blocks of FP8."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ExpertWeights
from tercel.errors import CheckpointError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.load import dummy_model, load_model, meta_model
from tercel.weights.manifest import account
from tests.weights.loading import CPU, LAYOUTS, assert_same, flat, load

LAYER = "language_model.model.layers.{}."
KDA, MLA = LAYER.format(0) + "self_attn.", LAYER.format(2) + "self_attn."
EXPERT = LAYER.format(1) + "block_sparse_moe.experts.2.w1."


def problems_of(model) -> list[str]:
    found = account(Checkpoint.open(model.path), ModelConfig.load(model.path))[1]
    return [str(problem) for problem in found]


@pytest.fixture(scope="module")
def plain_attention(nvfp4_original, tmp_path_factory):
    """The same checkpoint with the attention's values stored in fp32, multiplied here."""
    path = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(nvfp4_original.path, path)
    model = type(nvfp4_original)(path)
    scales = {}
    for shard in model.shards:
        scales |= {n: t for n, t in load_file(shard).items() if t.dim() == 4}
    for shard in model.shards:
        tensors = load_file(shard)
        for name in list(tensors):
            if name in scales:
                del tensors[name]
            elif f"{name}_scale" in scales:
                rows, columns = tensors[name].shape
                scale = scales[f"{name}_scale"][:, 0, :, 0]
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                tensors[name] = tensors[name].float() * scale[:rows, :columns]
        save_file(tensors, shard)
    model.reindex()
    return model


def test_no_problem_and_every_tensor_has_its_place(nvfp4_original):
    checkpoint = Checkpoint.open(nvfp4_original.path)
    manifest, problems = account(checkpoint, ModelConfig.load(nvfp4_original.path))
    assert problems == []
    by_key = {entry.key: entry for entry in manifest.entries}
    assert by_key[f"{EXPERT}weight_scale"].field == "layers.1.mlp.experts.w13_scale"
    assert by_key[f"{EXPERT}weight_scale_2"].field == "layers.1.mlp.experts.w13_scale_2"
    assert by_key[f"{KDA}q_proj.weight_scale"].field == "layers.0.attention.proj"
    unread = by_key[f"{EXPERT}input_scale"]
    assert (unread.field, unread.part, unread.shape) == (None, "activation scales", ())
    assert manifest.by("part")["activation scales"]["tensors"] == 5 * 4 * 3


def test_experts(nvfp4_original):
    t, at = nvfp4_original.tensors(), LAYER.format(1) + "block_sparse_moe.experts."

    def stack(leaf, *names):
        parts = [[t[f"{at}{e}.{name}.{leaf}"] for name in names] for e in range(4)]
        if leaf == "weight_scale_2":
            return torch.tensor([[float(each) for each in part] for part in parts])
        return torch.stack([torch.cat([x.view(torch.uint8) for x in part]) for part in parts])

    def scales(*names):
        return stack("weight_scale", *names).view(torch.float8_e4m3fn)

    want = ExpertWeights(
        stack("weight", "w1", "w3"),
        scales("w1", "w3"),
        stack("weight", "w2"),
        scales("w2"),
        stack("weight_scale_2", "w1", "w3"),
        stack("weight_scale_2", "w2"),
    )
    got = load(nvfp4_original, dtype=torch.bfloat16).layers[1].mlp.experts
    assert got.w13_scale.shape == (4, 256, 8) and got.w13_scale_2.shape == (4, 2)
    assert_same(got, want)


def test_slices_of_experts(nvfp4_original):
    whole = load(nvfp4_original).layers[1].mlp.experts
    part = load(nvfp4_original, "tp4_moetp2ep2", rank=3).layers[1].mlp.experts
    gate, up = whole.w13_scale[2:, 64:128], whole.w13_scale[2:, 192:]
    assert torch.equal(part.w13_scale.float(), torch.cat([gate, up], 1).float())
    assert torch.equal(part.w2_scale.float(), whole.w2_scale[2:, :, 4:].float())
    assert torch.equal(part.w13_scale_2, whole.w13_scale_2[2:])
    assert torch.equal(part.w2_scale_2, whole.w2_scale_2[2:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_the_values_of_its_blocks(nvfp4_original, plain_attention, layout):
    for rank in range(Layout.parse(layout).world_size):
        got, want = (load(each, layout, rank) for each in (nvfp4_original, plain_attention))
        assert_same(got, want)


def test_attention_is_rounded_to_the_activation_dtype(nvfp4_original):
    exact, rounded = (load(nvfp4_original, dtype=d) for d in (torch.float32, torch.bfloat16))
    for layer in (0, 2):
        for path, value in flat(exact.layers[layer].attention).items():
            got = flat(rounded.layers[layer].attention)[path]
            assert torch.equal(got, value.to(got.dtype)), path


@pytest.mark.parametrize("layout", ["tp1", "tp4_moetp2ep2"])
def test_dummy_and_meta_have_the_loaded_shapes(nvfp4_original, layout):
    args = ModelConfig.load(nvfp4_original.path), Layout.parse(layout), Layout.parse(layout).tp - 1
    loaded = flat(load(nvfp4_original, layout, args[2], torch.bfloat16))
    meta = flat(meta_model(*args, dtype=torch.bfloat16))
    dummy = flat(dummy_model(*args, dtype=torch.bfloat16, device=CPU))
    assert meta.keys() == dummy.keys() == loaded.keys()
    for path, value in loaded.items():
        for same in (meta[path], dummy[path]):
            assert same.shape == value.shape and same.dtype == value.dtype, path
        assert dummy[path].float().isfinite().all(), path


def test_second_scales_of_shape_one_are_read(nvfp4):
    before = load(nvfp4).layers[1].mlp.experts.w13_scale_2
    nvfp4.change(f"{EXPERT}weight_scale_2", lambda x: x.view(1))
    assert problems_of(nvfp4) == []
    assert torch.equal(load(nvfp4).layers[1].mlp.experts.w13_scale_2, before)


def test_activation_scales_may_be_absent(nvfp4):
    nvfp4.change(f"{EXPERT}input_scale", lambda x: None)
    assert problems_of(nvfp4) == []


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (f"{EXPERT}weight_scale_2", lambda x: None, "weight_scale_2: is missing"),
        (f"{EXPERT}weight_scale", lambda x: x.float(), "has dtype F32, expected F8_E4M3"),
        (f"{EXPERT}weight_scale", lambda x: x[:, ::2].contiguous(), "expected [128, 8]"),
        (f"{KDA}q_proj.weight_scale", lambda x: x[:, 0, :, 0].clone(), "expected [2, 1, 2, 1]"),
        (f"{MLA}q_b_proj.weight_scale", lambda x: x.transpose(0, 2).clone(), "has shape [1, 1, 6"),
        (f"{KDA}q_proj.weight_scale", lambda x: None, "layers.0.attention.proj needs it"),
        (f"{KDA}q_proj.weight", lambda x: x.float(), "has dtype F32, expected F8_E4M3"),
    ],
    ids=[
        "no scale_2",
        "fp32 block scales",
        "blocks of 32",
        "2-D scales",
        "4-D scales transposed",
        "no FP8 scales",
        "fp32 beside block scales",
    ],
)
def test_problems(nvfp4, name, change, text):
    nvfp4.change(name, change)
    found = problems_of(nvfp4)
    assert len(found) == 1 and text in found[0], found


def test_a_problem_stops_the_load(nvfp4):
    nvfp4.change(f"{EXPERT}weight_scale_2", lambda x: None)
    config = ModelConfig.load(nvfp4.path)
    with pytest.raises(CheckpointError, match="modelopt_mixed"):
        load_model(
            Checkpoint.open(nvfp4.path), config, Layout(), 0, dtype=torch.float32, device=CPU
        )
