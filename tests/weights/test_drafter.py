"""Drafters of every published format become the same weights, or are refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.core.drafter import DrafterConfig
from tercel.core.drafter_formats import drafter_config, read_drafter_config
from tercel.core.drafter_parameters import DrafterWeights, GqaWeights
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import MlaWeights
from tercel.errors import CheckpointError, ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter import dummy_drafter, load_drafter
from tercel.weights.drafter_table import Names, drafter_table
from tercel.weights.manifest import expected
from tercel.weights.tiny import tiny_config
from tercel.weights.tiny_drafter import FORMATS, tiny_drafter_config, write_random_drafter
from tests.drafters import K3_DSPARK, SPECFORGE, SPECULATORS, VECTORS
from tests.weights.loading import flat

CPU = torch.device("cpu")
TARGET = ModelConfig.from_dict(tiny_config("kimi_k3", 384))
EMBED = torch.randn(384, 256, generator=torch.Generator().manual_seed(3)).bfloat16().float()


def load(
    path: Path, layout: str = "tp1", rank: int = 0, embed: torch.Tensor = EMBED, **options: Any
) -> DrafterWeights:
    options = {"dtype": torch.float32, "device": CPU} | options
    parsed = Layout.parse(layout)
    config, checkpoint = read_drafter_config(path), Checkpoint.open(path)
    return load_drafter(checkpoint, config, parsed, rank, embed=embed, **options)


def write(path: Path, format: str = "specforge", **options: Any) -> DrafterConfig:
    config = tiny_drafter_config(format, TARGET, options.pop("changes", None))
    write_random_drafter(path, config, **options)
    return drafter_config(config)


def rewrite(path: Path, change: Any) -> None:
    """Renames or replaces the tensors of a written drafter."""
    file = path / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_read_and_loaded(format: str, tmp_path: Path) -> None:
    config = write(tmp_path, format)
    assert config == read_drafter_config(tmp_path)
    config.check_target(TARGET)
    weights = load(tmp_path)
    kind = MlaWeights if format == "k3_dspark" else GqaWeights
    assert all(isinstance(layer.attention, kind) for layer in weights.layers)
    tensors = load_file(tmp_path / "model.safetensors")
    loaded = sum(value.numel() for value in flat(weights).values()) - weights.inv_freq.numel()
    # The context's projection and norm are kept a second time, stacked over the layers.
    again = weights.context.kv.numel() + weights.context.kv_norm.numel()
    assert loaded == sum(value.numel() for value in tensors.values()) + again
    assert weights.embed is None and weights.mask_row is None


def test_rows_are_where_the_block_reads_them(tmp_path: Path) -> None:
    write(tmp_path)
    weights, t = load(tmp_path), load_file(tmp_path / "model.safetensors")
    t = {name: value.float() for name, value in t.items()}
    q, k, v = (t[f"layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    attention = weights.layers[1].attention
    assert isinstance(attention, GqaWeights)
    assert torch.equal(attention.qkv, torch.cat((q, k, v)))
    assert torch.equal(weights.context.kv.chunk(2)[1], torch.cat((k, v)))
    assert torch.equal(weights.context.kv_norm[1], t["layers.1.self_attn.k_norm.weight"])
    assert weights.markov is not None and weights.confidence is not None
    assert torch.equal(weights.markov.w2, t["markov_head.markov_w2.weight"])
    assert torch.equal(weights.confidence.bias, t["confidence_head.proj.bias"])
    expected = [10000 ** (-pair / 32) for pair in range(32)]
    torch.testing.assert_close(weights.inv_freq, torch.tensor(expected))


@pytest.mark.parametrize("format", ["specforge", "k3_dspark"])
def test_ranks_hold_equal_parts(format: str, tmp_path: Path) -> None:
    write(tmp_path, format)
    whole = flat(load(tmp_path))
    ranks = [flat(load(tmp_path, "tp2", rank)) for rank in range(2)]
    divided = {name for name, value in whole.items() if ranks[0][name].shape != value.shape}
    parts = {name.rpartition(".")[2] for name in divided}
    assert {"fc", "o_proj", "gate_up", "down", "w2"} <= parts
    assert parts >= ({"w_k", "w_v", "q_b"} if format == "k3_dspark" else {"qkv", "kv"})
    for name in divided - {x for x in divided if x.endswith(("qkv", ".kv", "gate_up"))}:
        dim = 1 if name.endswith(("fc", "o_proj", "down")) else 0
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name]), name
    for name in whole.keys() - divided:
        assert all(torch.equal(rank[name], whole[name]) for rank in ranks), name
    if format == "specforge":
        q, k, v = whole[".layers.0.attention.qkv"].split((256, 128, 128))
        for rank, weights in enumerate(ranks):
            own = torch.cat([x.chunk(2)[rank] for x in (q, k, v)])
            assert torch.equal(weights[".layers.0.attention.qkv"], own)
            kv = weights[".context.kv"].chunk(2)[0]
            assert torch.equal(kv, torch.cat([x.chunk(2)[rank] for x in (k, v)]))


def respelled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same drafter under the other names that occur."""
    names = {
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "confidence_proj.weight",
        "confidence_head.proj.bias": "confidence_proj.bias",
    }
    renamed = {f"model.{names.get(name, name)}": value for name, value in tensors.items()}
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        parts = [renamed.pop(f"{at}{x}_proj.weight") for x in "qkv"]
        renamed[f"{at}qkv_proj.weight"] = torch.cat(parts)
    return renamed


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_other_spellings_are_the_same_drafter(layout: str, tmp_path: Path) -> None:
    write(tmp_path)
    plain = flat(load(tmp_path, layout))
    rewrite(tmp_path, respelled)
    for name, value in flat(load(tmp_path, layout)).items():
        assert torch.equal(value, plain[name]), name


def test_a_copy_of_the_targets_embedding_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, embed=EMBED)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": torch.zeros(384, 256)})
    weights = load(tmp_path)
    assert weights.embed is None and weights.mask_row is None


def test_a_trained_mask_row_is_kept_and_the_targets_table_is_not_touched(tmp_path: Path) -> None:
    trained, target = EMBED.clone(), EMBED.clone()
    trained[382] += 1
    config = write(tmp_path, embed=trained)
    assert config.mask_token_id == 382
    weights = load(tmp_path, embed=target)
    assert weights.embed is None and weights.mask_row is not None
    assert torch.equal(weights.mask_row, trained[382].bfloat16().float())
    assert torch.equal(target, EMBED)


def test_a_table_of_its_own_is_kept_whole(tmp_path: Path) -> None:
    own = EMBED.flip(0)
    write(tmp_path, "k3_dspark", embed=own)
    weights = load(tmp_path)
    assert (
        weights.embed is not None and torch.equal(weights.embed, own) and weights.mask_row is None
    )
    with pytest.raises(ConfigError, match="embed: the target's table is"):
        load(tmp_path, embed=EMBED[:-1])


def without_heads(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in t.items() if "markov" not in name}


HEADLESS = {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False}
BROKEN: dict[str, Any] = {
    "heads that the config leaves out": (
        HEADLESS,
        lambda t: t,
        "markov_w1.weight: is not a tensor",
    ),
    "heads that are missing": ({}, without_heads, "markov_w1.weight: is missing"),
    "reduced vocabulary": ({}, lambda t: {**t, "d2t": torch.zeros(8)}, "d2t: is not a tensor"),
    "another width": (
        {},
        lambda t: {**t, "fc.weight": t["fc.weight"][:, :-256]},
        "fc.weight: has shape [256, 512], expected [256, 768]",
    ),
    "another table": (
        {},
        lambda t: {**t, "embed_tokens.weight": torch.zeros(4, 256)},
        "embed_tokens.weight: has shape [4, 256]",
    ),
}


@pytest.mark.parametrize(("changes", "change", "words"), BROKEN.values(), ids=BROKEN)
def test_refuses(changes: dict[str, Any], change: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path)
    rewrite(tmp_path, change)
    config = tiny_drafter_config("specforge", TARGET, changes)
    for name, value in changes.items():
        config["dflash_config"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert words in str(error.value) and "config.json declares: markov_rank is" in str(error.value)


def test_a_cut_file_is_one_problem(tmp_path: Path) -> None:
    write(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    whole = shard.read_bytes()
    for size, words in ((100, "its header is cut or damaged"), (-100, "truncated: ")):
        shard.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as error:
            load(tmp_path)
        assert f"1 problem:\n  {shard.name}: {words}" in str(error.value)


def test_a_layout_that_does_not_divide_it(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match="num_key_value_heads 2 does not divide by tp 4"):
        load(tmp_path, "tp4")
    with pytest.raises(ConfigError, match="names no field of"):
        load(tmp_path, packs={"MoeWeights.experts": lambda x: x})


@pytest.mark.parametrize("format", FORMATS)
def test_dummy_weights_have_the_shapes_of_loaded_ones(format: str, tmp_path: Path) -> None:
    config = write(tmp_path, format)
    loaded = flat(load(tmp_path, "tp2", 1))
    options = {"dtype": torch.float32}
    for device in (CPU, torch.device("meta")):
        dummy = flat(dummy_drafter(config, Layout.parse("tp2"), 1, device=device, **options))
        assert {n: v.shape for n, v in dummy.items()} == {n: v.shape for n, v in loaded.items()}


PUBLISHED = {
    # Tensors and parameters: K3DSparkModel's as published, with its embedding of 163840 x 7168.
    "K3DSparkModel": (K3_DSPARK, 68, 3_562_312_961),
    "SpecForge, 64 heads": (SPECFORGE, 62, 2_249_289_601),
    "speculators, 96 heads": (SPECULATORS, 62, 2_396_090_241),
}


@pytest.mark.parametrize(("config", "count", "size"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_drafters(config: dict[str, Any], count: int, size: int) -> None:
    table = expected(drafter_table(drafter_config(config), Names()))
    sizes = [math.prod(source.shape) for source, _ in table.values()]
    mla = config.get("model_type") == "k3_dspark"
    if mla:
        sizes.append(163840 * 7168)
    assert (len(sizes), sum(sizes)) == (count, size)
    first = "context_proj.weight" if mla else "fc.weight"
    assert first in table and "markov_head.markov_w1.weight" in table


@pytest.mark.parametrize("name", ["drafter_gqa", "drafter_mla"])
def test_vectors_load(name: str) -> None:
    embed = load_file(VECTORS / name / "expected.safetensors")["embed"]
    weights = load(VECTORS / name, embed=embed)
    assert (weights.embed is not None) == (name == "drafter_mla")
    assert (weights.context.tap_norm is not None) == (name == "drafter_mla")
