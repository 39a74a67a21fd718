"""The ranks of a layout together hold every checkpoint row once, the declared ones excepted."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tercel.cli import main
from tercel.core.drafter_formats import read_drafter_config
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter import StoredTable, load_drafter
from tercel.weights.load import load_model
from tercel.weights.manifest import family_of_config, manifest_from_config
from tercel.weights.published import published_config
from tercel.weights.quantization import declared_format
from tercel.weights.rank_manifest import rank_manifest
from tercel.weights.rows import Place
from tercel.weights.table import model_table
from tercel.weights.tiny import FAMILIES, tiny_config
from tests.targets.layouts import FOR_16_RANKS, K3_FOR_16_RANKS, LAYOUTS
from tests.weights.loading import flat

REPLICATED = re.compile(
    r"norm$|layernorm$|_res_(norm|proj)$|\.(q_a_proj|kv_a_proj_with_mqa|f_a_proj|g_a_proj)$"
    r"|\.gate(\.e_score_correction_bias)?$|\.routed_expert_down_proj$"
)
"""What every rank of a stage reads whole: norms, selections, latents before the heads, the router,
and the way down into the experts' latent."""
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
EMBED = "language_model.model.embed_tokens.weight"
PUBLISHED = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")


def config_for_16_ranks(family):
    changes = {**FOR_16_RANKS, **(K3_FOR_16_RANKS if family == "kimi_k3" else {})}
    return tiny_config(family, 512, changes=changes)


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp4_moetp2ep2_pp2", "tp1_pp5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_cover_every_row_once(family, layout):
    config_json, layout = config_for_16_ranks(family), Layout.parse(layout)
    config, formats = ModelConfig.from_dict(config_json), declared_format(config_json)
    counts: dict[str, torch.Tensor] = {}
    for rank in range(layout.world_size):
        place, layers = Place(layout, rank), layout.stage_layers(rank, config.num_hidden_layers)
        table = model_table(config, family_of_config(config_json), formats, layers)
        for _, row in table.rows():
            for expert in place.experts(row):
                for source in row.sources:
                    key = source.key.format(expert=expert)
                    count = counts.setdefault(key, torch.zeros(source.shape, dtype=torch.int32))
                    place.cut(source, count).add_(1)
    entries = {entry.key: entry for entry in manifest_from_config(config_json).entries}
    assert counts.keys() == entries.keys()
    for key, count in counts.items():
        used = count.flatten()[: entries[key].used]
        copies = layout.tp if REPLICATED.search(key.removesuffix(".weight")) else 1
        assert (used == copies).all(), key


@pytest.fixture(scope="module")
def text_bytes():
    """Of the published K3."""
    entries = manifest_from_config(published_config("kimi_k3_mxfp4")).entries
    return sum(entry.num_bytes for entry in entries if entry.field)


@pytest.mark.parametrize("layout", PUBLISHED)
def test_ranks_of_the_published_k3_add_up_to_it(text_bytes, layout):
    config, layout = published_config("kimi_k3_mxfp4"), Layout.parse(layout)
    padding = 69 * 32 * 4  # of A_log
    total = 0
    for first in range(0, layout.world_size, layout.tp):
        part, last = (rank_manifest(config, layout, first + i) for i in (0, layout.tp - 1))
        sharing = part.by("sharing")
        assert last.by("sharing") == sharing
        total += layout.tp * sharing["divided"]["bytes"] + sharing["replicated"]["bytes"]
    assert total == text_bytes - padding


@pytest.mark.parametrize(
    ("layout", "rank", "num_bytes"),
    [
        ("tp16_moetp4ep4", 5, 103_845_821_560),
        ("tp16_moetp16ep1", 5, 103_845_821_560),
        ("tp8_pp2", 0, 100_635_417_280),
        ("tp8_pp2", 15, 100_285_056_048),
    ],
)
def test_bytes_of_a_rank_of_the_published_k3(layout, rank, num_bytes, capsys):
    arguments = ["checkpoint", "manifest", "--layout", layout, "--rank", str(rank), "--json"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["bytes"] == num_bytes
    experts = summary["by_part"]["mlp.experts"]["bytes"]
    layers = 92 if layout != "tp8_pp2" else 46
    ranks = 16 if layout != "tp8_pp2" else 8
    assert experts == layers * 896 * 3 * 3072 * 3584 // 2 * 17 // 16 // ranks


@pytest.mark.parametrize("layout", ["tp1", "tp4_moetp2ep2", "tp2_pp2"])
def test_a_rank_reads_what_its_manifest_says(originals, layout):
    path, layout = originals["kimi_k3"].path, Layout.parse(layout)
    config_json = json.loads((path / "config.json").read_text())
    for rank in range(layout.world_size):
        total = Counter()

        def progress(done, bytes_of_rank, total=total):
            total["done"], total["all"] = done, bytes_of_rank

        load_model(
            Checkpoint.open(path),
            ModelConfig.load(path),
            layout,
            rank,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            progress=progress,
        )
        assert total["done"] == rank_manifest(config_json, layout, rank).num_bytes


@pytest.mark.parametrize(
    ("layout", "again"), [("tp1", 0), ("tp2", 0), ("tp1_pp2", 1280), ("tp2_pp2", 640)]
)
def test_a_drafter_keeps_no_copy_of_the_targets_embedding(layout, again):
    """A last stage that is not the first reads its own rows of it."""
    target = json.loads((CHECKPOINTS / "nano/config.json").read_text())
    drafter, layout = read_drafter_config(CHECKPOINTS / "nano-dspark"), Layout.parse(layout)
    rank = layout.world_size - 1
    part = rank_manifest(target, layout, rank, drafter)
    assert set(rank_manifest(target, layout, rank).entries) <= set(part.entries)
    own = {e.field: e for e in part.entries if e.field.startswith("drafter.")}
    embed = own.pop("drafter.embed", None)
    assert (0 if embed is None else embed.num_bytes) == again * 256 * 2
    weights = load_drafter(
        Checkpoint.open(CHECKPOINTS / "nano-dspark"),
        drafter,
        layout,
        rank % layout.tp,
        embed=StoredTable(Checkpoint.open(CHECKPOINTS / "nano"), EMBED),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert weights.embed is None and weights.mask_row is not None
    derived = weights.mask_row.nbytes + weights.inv_freq.nbytes
    kept = sum(tensor.nbytes for tensor in flat(weights).values()) - derived
    entries = [e for e in part.entries if e.field.startswith("drafter.") and e is not embed]
    assert kept == sum(entry.num_bytes for entry in entries)


def test_copies_of_experts_and_of_what_lies_beside_them():
    config = published_config("kimi_k3_nvfp4")
    part = rank_manifest(config, Layout.parse("tp16_moetp4ep4"), 0)
    copies = {entry.field.rpartition(".")[2]: entry.num_copies for entry in part.entries}
    assert (copies["w13"], copies["w13_scale"], copies["w13_scale_2"]) == (1, 1, 4)


@pytest.mark.parametrize(
    ("layout", "rank", "message"),
    [
        ("tp5", 0, "does not divide by tp 5"),
        ("tp2", 2, "rank: 2 is outside the 2 of tp2"),
        ("helix8", 0, r"decode_cp=8\) is not built"),
        ("nothing", 0, "is not a layout name"),
    ],
)
def test_refused(layout, rank, message, capsys):
    with pytest.raises(ConfigError, match=message):
        rank_manifest(published_config("kimi_k3_mxfp4"), Layout.parse(layout), rank)
    assert main(["checkpoint", "manifest", "--layout", layout, "--rank", str(rank)]) == 1
    assert "Traceback" not in capsys.readouterr().err
