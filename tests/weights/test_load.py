import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ExpertWeights, KdaWeights, MlaWeights, MoeWeights
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.load import dummy_model, meta_model
from tercel.weights.manifest import checkpoint_table
from tercel.weights.rows import Place
from tercel.weights.tiny import FAMILIES
from tests.weights.conftest import Model
from tests.weights.loading import CPU, LAYOUTS, assert_same, flat, load


def test_kda_layer_of_k3(originals):
    t, at = originals["kimi_k3"].tensors(), "language_model.model.layers.0.self_attn."
    parts = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    want = KdaWeights(
        proj=torch.cat([t[f"{at}{part}.weight"] for part in parts]).float(),
        f_b=t[f"{at}f_b_proj.weight"].float(),
        g_b=None,
        conv=torch.cat([t[f"{at}{x}_conv1d.weight"] for x in "qkv"])[:, 0],
        A_log=t[f"{at}A_log"][:4],
        dt_bias=t[f"{at}dt_bias"],
        o_norm=t[f"{at}o_norm.weight"],
        o_proj=t[f"{at}o_proj.weight"].float(),
    )
    assert t[f"{at}A_log"].shape == (128,)
    assert_same(load(originals["kimi_k3"]).layers[0].attention, want)


def test_kda_layer_of_kimi_linear(originals):
    t, at = originals["kimi_linear"].tensors(), "model.layers.0.self_attn."
    parts = ("q_proj", "k_proj", "v_proj", "g_a_proj", "f_a_proj", "b_proj")
    want = KdaWeights(
        proj=torch.cat([t[f"{at}{part}.weight"] for part in parts]),
        f_b=t[f"{at}f_b_proj.weight"],
        g_b=t[f"{at}g_b_proj.weight"],
        conv=torch.cat([t[f"{at}{x}_conv1d.weight"] for x in "qkv"])[:, 0].float(),
        A_log=t[f"{at}A_log"].flatten(),
        dt_bias=t[f"{at}dt_bias"],
        o_norm=t[f"{at}o_norm.weight"].float(),
        o_proj=t[f"{at}o_proj.weight"],
    )
    assert t[f"{at}q_conv1d.weight"].dtype == torch.bfloat16  # read and kept exactly in fp32
    assert_same(load(originals["kimi_linear"], dtype=torch.bfloat16).layers[0].attention, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_small_tensors_of_kimi_linear_in_either_dtype(originals, tmp_path, dtype):
    """Releases store them in bf16 or fp32: the header decides, and they are kept in fp32."""
    shutil.copytree(originals["kimi_linear"].path, tmp_path / "model")
    model, at = Model(tmp_path / "model"), "model.layers.0.self_attn."
    names = ("A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight")
    for name in names:
        model.change(f"{at}{name}", lambda x: x.to(dtype))
    got, t = load(model, dtype=torch.bfloat16).layers[0].attention, model.tensors()
    wanted = [t[f"{at}{name}"].float() for name in names]
    for value, want in zip((got.A_log, got.dt_bias, got.o_norm, got.conv), wanted, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value.flatten()[: want.numel()], want.flatten())


def test_mla_layer_of_k3(originals):
    t, at = originals["kimi_k3"].tensors(), "language_model.model.layers.2.self_attn."
    kv_b = t[f"{at}kv_b_proj.weight"].view(4, 256, 32)
    parts = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
    want = MlaWeights(
        proj=torch.cat([t[f"{at}{part}.weight"] for part in parts]),
        q_norm=t[f"{at}q_a_layernorm.weight"],
        q_b=t[f"{at}q_b_proj.weight"],
        kv_norm=t[f"{at}kv_a_layernorm.weight"],
        w_k=kv_b[:, :128],
        w_v=kv_b[:, 128:],
        o_proj=t[f"{at}o_proj.weight"],
    )
    assert_same(load(originals["kimi_k3"], dtype=torch.bfloat16).layers[2].attention, want)


def test_mla_layer_of_kimi_linear(originals):
    t, at = originals["kimi_linear"].tensors(), "model.layers.2.self_attn."
    got = load(originals["kimi_linear"], dtype=torch.bfloat16).layers[2].attention
    parts = ("q_proj", "kv_a_proj_with_mqa")
    assert torch.equal(got.proj, torch.cat([t[f"{at}{part}.weight"] for part in parts]))
    assert got.q_norm is None and got.q_b is None


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_layer(originals, family):
    t, quantized = originals[family].tensors(), family == "kimi_k3"
    at = ("language_model." if quantized else "") + "model.layers.1.block_sparse_moe."
    got = load(originals[family], dtype=torch.bfloat16).layers[1].mlp

    def stack(leaf, *names):
        return torch.stack(
            [torch.cat([t[f"{at}experts.{e}.{n}.{leaf}"] for n in names]) for e in range(4)]
        )

    if quantized:
        want = ExpertWeights(
            stack("weight_packed", "w1", "w3"),
            stack("weight_scale", "w1", "w3"),
            stack("weight_packed", "w2"),
            stack("weight_scale", "w2"),
        )
    else:
        want = ExpertWeights(stack("weight", "w1", "w3"), None, stack("weight", "w2"), None)
    assert_same(got.experts, want)
    assert torch.equal(got.router, t[f"{at}gate.weight"])
    assert torch.equal(got.router_bias, t[f"{at}gate.e_score_correction_bias"])
    assert got.router_bias.dtype == torch.float32
    assert torch.equal(got.shared.down, t[f"{at}shared_experts.down_proj.weight"])
    assert (got.down is None) == (got.latent_norm is None) == (got.up is None) == (not quantized)


def test_top_of_the_model(originals):
    t, at = originals["kimi_k3"].tensors(), "language_model."
    got = load(originals["kimi_k3"], dtype=torch.bfloat16)
    assert torch.equal(got.embed, t[f"{at}model.embed_tokens.weight"])
    assert torch.equal(got.head, t[f"{at}lm_head.weight"])
    assert torch.equal(got.norm, t[f"{at}model.norm.weight"])
    assert torch.equal(got.output_res.proj, t[f"{at}model.output_attn_res_proj.weight"][0])
    layer = got.layers[3]
    assert torch.equal(layer.mlp_res.norm, t[f"{at}model.layers.3.mlp_res_norm.weight"])
    assert load(originals["kimi_linear"]).output_res is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_fp32_tensors_keep_their_dtype(originals, family, dtype):
    keeps = ("conv", "A_log", "dt_bias", "o_norm", "router_bias")
    for path, value in flat(load(originals[family], dtype=dtype)).items():
        quantized = family == "kimi_k3" and ".experts." in path
        want = torch.float32 if path.endswith(keeps) else torch.uint8 if quantized else dtype
        assert value.dtype == want, path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_cover_every_row_once(originals, family, layout):
    config = ModelConfig.load(originals[family].path)
    layout = Layout.parse(layout)
    table = checkpoint_table(Checkpoint.open(originals[family].path), config)
    for path, row in table.rows():
        for source in row.sources:
            count = torch.zeros((row.num_experts or 1, *source.shape), dtype=torch.int32)
            for rank in range(layout.tp):
                place = Place(layout, rank)
                for expert in place.experts(row):
                    place.cut(source, count[expert]).add_(1)
            used = source.view(count[0]) if row.num_experts is None else count
            copies = layout.tp if source.axis is None else 1
            assert (used == copies).all(), (path, source.key)


def test_slices_of_one_rank(originals):
    full = load(originals["kimi_k3"])
    part = load(originals["kimi_k3"], "tp4_moetp2ep2", rank=3)
    kda, whole = part.layers[0].attention, full.layers[0].attention
    q, k = whole.proj[96:128], whole.proj[128 + 96 : 256]
    assert torch.equal(kda.proj[:64], torch.cat([q, k]))
    assert torch.equal(kda.proj[-1], whole.proj[-1])  # b of the fourth head
    assert torch.equal(kda.proj[-33:-1], whole.proj[-36:-4])  # f_a, on every rank
    assert torch.equal(kda.A_log, whole.A_log[3:])
    assert torch.equal(kda.o_proj, whole.o_proj[:, 96:])
    assert torch.equal(part.layers[2].attention.w_v, full.layers[2].attention.w_v[3:])
    # Rank 3 of 2 x 2: the second half of the experts, the second half of their width.
    experts, all_experts = part.layers[1].mlp.experts, full.layers[1].mlp.experts
    gate, up = all_experts.w13[2:, 64:128], all_experts.w13[2:, 192:]
    assert torch.equal(experts.w13, torch.cat([gate, up], 1))
    assert torch.equal(experts.w2_scale, all_experts.w2_scale[2:, :, 2:])
    assert torch.equal(part.head, full.head[384:]) and torch.equal(part.embed, full.embed[384:])


@pytest.mark.parametrize(
    ("rank", "experts", "width"), [(0, range(2), 0), (1, range(2, 4), 0), (2, range(2), 1)]
)
def test_neighbouring_ranks_hold_different_experts(originals, rank, experts, width):
    full = load(originals["kimi_linear"]).layers[1].mlp.experts.w2
    part = load(originals["kimi_linear"], "tp4_moetp2ep2", rank).layers[1].mlp.experts.w2
    assert torch.equal(part, full[experts.start : experts.stop, :, 64 * width : 64 * width + 64])


def test_pipeline_stages_take_their_layers(originals):
    full = load(originals["kimi_k3"])
    first, second = (load(originals["kimi_k3"], "tp1_pp2", rank) for rank in (0, 1))
    assert_same((*first.layers, *second.layers), full.layers)


def test_pack_replaces_the_field_and_frees_its_input(originals):
    seen = []

    def pack(experts: ExpertWeights) -> ExpertWeights:
        gc.collect()
        alive = [ref() for ref in seen if ref() is not None]
        assert not alive, "an earlier layer's experts are still in memory"
        seen.append(weakref.ref(experts.w13))
        return ExpertWeights(experts.w13.sum(0), None, experts.w2.sum(0), None)

    model = load(originals["kimi_k3"], packs={"MoeWeights.experts": pack})
    assert len(seen) == 5
    assert model.layers[1].mlp.experts.w13.dim() == 2
    assert isinstance(model.layers[1].mlp, MoeWeights)


def test_pack_of_no_field(originals):
    with pytest.raises(ConfigError, match=r"packs: 'MoeWeights.expert' names no field"):
        load(originals["kimi_k3"], packs={"MoeWeights.expert": lambda x: x})


def test_progress_ends_at_the_weights(originals):
    calls = []
    model = load(originals["kimi_k3"], "tp2", 1, progress=lambda *done: calls.append(done))
    total = sum(value.nbytes for value in flat(model).values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_no_file_is_mapped_and_one_is_open_at_a_time(originals):
    """A mapped file that is cut ends the process that touches it."""
    shards, opened = {str(shard) for shard in originals["kimi_k3"].shards}, set()

    def progress(done: int, total: int) -> None:
        assert not any(shard in Path("/proc/self/maps").read_text() for shard in shards)
        files = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()}
        opened.add(frozenset(files & shards))

    load(originals["kimi_k3"], progress=progress)
    assert {len(now) for now in opened} == {1} and len(opened) == 3


@pytest.mark.parametrize("layout", ["tp1", "tp4_moetp2ep2"])
def test_dummy_and_meta_have_the_loaded_shapes(originals, layout):
    config = ModelConfig.load(originals["kimi_k3"].path)
    rank = Layout.parse(layout).tp - 1
    args = config, Layout.parse(layout), rank
    loaded = flat(load(originals["kimi_k3"], layout, rank, torch.bfloat16))
    meta = flat(meta_model(*args, dtype=torch.bfloat16))
    dummy, again, other = (
        flat(dummy_model(*args, dtype=torch.bfloat16, device=CPU, seed=seed)) for seed in (0, 0, 1)
    )
    assert meta.keys() == dummy.keys() == loaded.keys()
    for path, value in loaded.items():
        for same in (meta[path], dummy[path]):
            assert same.shape == value.shape and same.dtype == value.dtype, path
        assert meta[path].is_meta
        assert torch.equal(dummy[path], again[path])
        assert dummy[path].float().isfinite().all()
    assert not torch.equal(dummy[".head"], other[".head"])


def test_layout_that_does_not_divide(originals):
    with pytest.raises(ConfigError, match="num_attention_heads 4 does not divide by tp 8"):
        load(originals["kimi_k3"], "tp8")


def test_split_inside_a_block_of_scales(kimi_k3):
    config = ModelConfig.load(kimi_k3.path)
    split = Layout.parse("tp4_moetp4ep1")
    meta_model(config, split, 0, dtype=torch.float32)
    text = (kimi_k3.path / "config.json").read_text()
    (kimi_k3.path / "config.json").write_text(
        text.replace('"moe_intermediate_size": 128', '"moe_intermediate_size": 64')
    )
    config = ModelConfig.load(kimi_k3.path)
    with pytest.raises(ConfigError, match=r"w2.weight_scale .* does not divide by 4"):
        meta_model(config, split, 0, dtype=torch.float32)


def test_rank_outside_the_layout(originals):
    with pytest.raises(ConfigError, match="rank: 2 is outside the 2 of tp2"):
        load(originals["kimi_k3"], "tp2", 2)
