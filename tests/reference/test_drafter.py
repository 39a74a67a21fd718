"""The reference drafter against layers of transformers (tools/drafter_vectors.py), and what it
promises about itself."""

import ast
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tercel.core.drafter import Embedding
from tercel.reference import drafter, kimi_k3
from tercel.reference.drafter import Config, Drafter, Taps, rotate, softmax_scale
from tercel.reference.weights import init_weights
from tests.drafters import read_vector, reference_state
from tests.reference.test_kimi_k3 import CONFIGS
from training.dspark.drafter import reference_config

VECTORS = {"drafter_gqa": Embedding.TARGET, "drafter_mla": Embedding.OWN}
S, G, VOCABULARY = 21, 5, 64
ANCHOR = 3
"""Tokens behind the anchor in the vectors: their taps must not matter."""


def load(name: str, **changes: Any) -> tuple[Drafter, dict[str, Tensor]]:
    """The drafter of a vector in fp64, and the vector."""
    config, tensors, vector = read_vector(name)
    model = Drafter(replace(reference_config(config, VECTORS[name]), **changes)).double()
    model.load_state_dict({k: v.double() for k, v in reference_state(tensors).items()})
    return model, {k: v.double() if v.is_floating_point() else v for k, v in vector.items()}


def run(model: Drafter, vector: dict[str, Tensor], drafts: int = G, **given: Tensor) -> Tensor:
    """Hidden rows [g, X] of the vector's draft."""
    v = vector | given
    with torch.no_grad():
        anchor, position = v["anchor"].view(1, 1), v["position"].view(1, 1)
        return model(v["taps"][None], anchor, position, drafts, v["embed"])[0, 0]


def test_one_short_file_over_torch() -> None:
    source = Path(drafter.__file__).read_text()
    assert source.count("\n") < 500
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("name", VECTORS)
def test_equals_transformers(name: str) -> None:
    model, v = load(name)
    assert (run(model, v) - v["hidden"]).abs().max() < 1e-5 * v["hidden"].abs().max()
    with torch.no_grad():
        draft = model.draft(
            v["taps"][None],
            v["anchor"].view(1, 1),
            v["position"].view(1, 1),
            G,
            v["embed"],
            v["head"],
        )
    assert torch.equal(draft.tokens[0, 0], v["tokens"])
    torch.testing.assert_close(draft.logits[0, 0], v["logits"], rtol=1e-4, atol=1e-4)
    assert draft.confidence is not None
    torch.testing.assert_close(draft.confidence[0, 0], v["confidence"], rtol=1e-4, atol=1e-4)


MUTATIONS: dict[str, dict[str, Any]] = {
    "other pairs": {"rope_interleaved": True},
    "no YaRN": {"yarn": None},
    "eps": {"rms_norm_eps": 1e-2},
    "no window": {"windows": None},
    "window from the anchor": {"window_from_anchor": True},
    "not causal": {"causal": None},
    "another mask token": {"mask_token_id": 5},
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_configuration_does_not_equal_transformers(change: dict[str, Any]) -> None:
    model, v = load("drafter_gqa", **change)
    assert (run(model, v) - v["hidden"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", VECTORS)
def test_context_is_strictly_before_the_anchor(name: str) -> None:
    model, v = load(name)
    expected = run(model, v)
    for row, matters in ((S - ANCHOR - 1, True), (S - ANCHOR, False), (S - 1, False)):
        taps = v["taps"].clone()
        taps[row] += 1
        assert torch.equal(run(model, v, taps=taps), expected) != matters


def test_a_batch_of_anchors_is_as_many_decoding_steps() -> None:
    """Blocks do not see each other, nor what lies behind their anchor."""
    model, v = load("drafter_gqa")
    taps = torch.stack([v["taps"], v["taps"].flip(0)])
    positions = torch.tensor([[2, 9, 9, 21], [0, 5, 13, 20]])
    anchors = torch.arange(8).view(2, 4)
    with torch.no_grad():
        together = model(taps, anchors, positions, G, v["embed"])
        for row in range(2):
            for block in range(4):
                start = int(positions[row, block])
                given = taps[row, :start], anchors[row, block], positions[row, block]
                context, anchor, position = given
                alone = model(context[None], anchor.view(1, 1), position.view(1, 1), G, v["embed"])
                torch.testing.assert_close(together[row, block], alone[0, 0])


def test_slots_see_each_other_unless_causal() -> None:
    for causal, same in ((None, False), ((True, True), True)):
        model, v = load("drafter_gqa", causal=causal, windows=None)
        narrow, whole = run(model, v, drafts=2), run(model, v)[:2]
        assert torch.allclose(narrow, whole, rtol=1e-12) == same


@pytest.mark.parametrize(
    ("from_anchor", "seen"),
    [
        (True, [{14, 15, 16, 17}] * 3),
        (False, [{15, 16, 17}, {16, 17}, {17}]),
    ],
)
def test_windows(from_anchor: bool, seen: list[set[int]]) -> None:
    model, _ = load("drafter_gqa", windows=(4, 4), window_from_anchor=from_anchor)
    mask = model.visible(0, torch.tensor([[18]]), 3, S)[0]
    assert [set(row[:S].nonzero().flatten().tolist()) for row in mask] == seen
    assert torch.equal(mask[:, S:], torch.ones(3, 3, dtype=torch.bool).tril())


def test_slot_conventions() -> None:
    """The masked form leaves out the anchor's slot of a block that is one slot wider."""
    anchored, v = load("drafter_gqa", causal=None)
    masked, _ = load("drafter_gqa", causal=None, anchor_predicts=False)
    torch.testing.assert_close(run(masked, v, 4), run(anchored, v, 5)[1:])
    for model, most in ((anchored, 6), (masked, 5)):
        assert model.config.width(most) == 6
        with pytest.raises(ValueError, match="do not fit a block of 6"):
            model.config.width(most + 1)


def test_tap_ids_by_either_name_are_the_same_layers() -> None:
    model, _ = load("drafter_gqa")
    inputs = replace(model.config, tap_ids=(2, 5, 8), tap_ids_name="inputs")
    assert inputs.taps == model.config.taps == (1, 4, 7)
    with pytest.raises(ValueError, match="must ascend"):
        _ = replace(inputs, tap_ids=(0, 5)).taps


def test_taps_are_the_rows_that_the_target_reports() -> None:
    target = kimi_k3.Model(kimi_k3.Config.from_dict(CONFIGS["kimi_k3"]))
    init_weights(target, seed=1)
    tokens = torch.arange(12).view(1, 12)
    rows: dict[str, list[Tensor]] = {"prefix": [], "mixture": []}

    def capture(layer: int, prefix: Tensor, mixture: Tensor) -> None:
        rows["prefix"].append(prefix)
        rows["mixture"].append(mixture)

    base = load("drafter_gqa")[0].config
    with torch.no_grad():
        target(tokens, capture=capture)
        for stream, expected in rows.items():
            taps = Taps(replace(base, tap_ids=(0, 3, 8), tap_stream=stream))
            target(tokens, capture=taps)
            assert torch.equal(taps.features(), torch.cat([expected[i] for i in (0, 3, 8)], -1))
    assert not torch.equal(rows["prefix"][3], rows["mixture"][3])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_distances_only(interleaved: bool) -> None:
    c = replace(load("drafter_gqa")[0].config, rope_interleaved=interleaved)
    x = torch.randn(1, 6, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = []
    for start in (0, 1000):
        turned = rotate(x, start + torch.arange(6)[None], c)[0, :, 0]
        scores.append(turned @ turned.T)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(scores[0], x[0, :, 0] @ x[0, :, 0].T)


def test_yarn_of_the_published_mla_drafter() -> None:
    """Factor 32 from 32768 tokens: 1 + 0.1 ln 32 = 1.34657, squared into the softmax scale."""
    yarn = drafter.Yarn(factor=32.0, original_max_position=32768, mscale=1.0, mscale_all_dim=1.0)
    base = load("drafter_mla")[0].config
    c = replace(base, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=50000.0, yarn=yarn)
    assert softmax_scale(c) == pytest.approx(192**-0.5 * 1.3465736**2, rel=1e-6)
    assert drafter.rotation_scale(c) == 1.0
    frequencies = drafter.inverse_frequencies(c)
    plain = drafter.inverse_frequencies(replace(c, yarn=None))
    assert torch.equal(frequencies[:14], plain[:14])
    torch.testing.assert_close(frequencies[26:], plain[26:] / 32)


def test_the_mask_row_is_the_drafters_and_the_anchors_the_targets() -> None:
    config, _, _ = read_vector("drafter_gqa")
    model = Drafter(reference_config(config, Embedding.MASK_ROW)).double()
    embed = torch.randn(VOCABULARY, 32, dtype=torch.float64)
    anchors = torch.tensor([[3, config.mask_token_id]])
    rows = model.block(anchors, 4, embed)
    assert torch.equal(rows[0, :, 0], embed[anchors[0]])
    assert torch.equal(rows[0, :, 1:], torch.zeros(2, 3, 32, dtype=torch.float64))


def test_without_heads_it_is_dflash() -> None:
    config, _, v = read_vector("drafter_gqa")
    plain = reference_config(replace(config, markov_rank=0, confidence_head=False))
    model = Drafter(replace(plain, confidence_with_markov=False))
    assert not any(name.startswith(("markov", "confidence")) for name in model.state_dict())
    given = v["taps"][None], v["anchor"].view(1, 1), v["position"].view(1, 1), G, v["embed"]
    with torch.no_grad():
        draft = model.draft(*given, v["head"])
        torch.testing.assert_close(draft.logits, model(*given) @ v["head"].T)
    assert draft.confidence is None


def test_the_chain_is_conditioned_on_what_was_chosen() -> None:
    model, v = load("drafter_gqa")
    given = v["taps"][None], v["anchor"].view(1, 1), v["position"].view(1, 1), G, v["embed"]
    chosen = torch.tensor([7, 7, 8, 9, 60])
    with torch.no_grad():
        draft = model.draft(*given, v["head"], choose=lambda logits, slot: chosen[slot].view(1, 1))
        before = torch.cat([v["anchor"].view(1), chosen[:-1]])
        teacher_forced = model.logits(model(*given), before, v["head"])
    assert torch.equal(draft.tokens[0, 0], chosen)
    torch.testing.assert_close(draft.logits, teacher_forced)


def counting(config: Config) -> Drafter:
    """Trained until it counts on a cycle of 16 tokens; its taps are the tokens' embeddings."""
    torch.manual_seed(0)
    model = Drafter(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    embed = torch.nn.functional.one_hot(torch.arange(VOCABULARY), VOCABULARY)[:, :32].float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(120):
        tokens = (torch.randint(16, (4, 1)) + torch.arange(12)) % 16
        positions = torch.stack([torch.randperm(7)[:3] for _ in range(4)])
        labels = tokens.gather(1, (positions[..., None] + 1 + torch.arange(G)).flatten(1))
        labels = labels.view(4, 3, G)
        anchors = tokens.gather(1, positions)
        taps = embed[tokens].repeat(1, 1, 3)[..., : 3 * config.target_hidden_size]
        hidden = model(taps, anchors, positions, G, embed)
        before = torch.cat([anchors[..., None], labels[..., :-1]], -1)
        logits = model.logits(hidden, before, embed)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten())
        loss = loss + model.confidence(hidden, before).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_it_trains_and_slot_zero_is_the_token_after_the_anchor() -> None:
    config, _, _ = read_vector("drafter_gqa")
    model = counting(replace(reference_config(config, Embedding.MASK_ROW), causal=None))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    embed = torch.nn.functional.one_hot(torch.arange(VOCABULARY), VOCABULARY)[:, :32].float()
    tokens = (5 + torch.arange(8)) % 16
    taps = embed[tokens[:-1]].repeat(1, 3)[None, :, :72]
    with torch.no_grad():
        draft = model.draft(taps, tokens[-1].view(1, 1), torch.tensor([[7]]), G, embed, embed)
    assert draft.tokens[0, 0].tolist() == [(int(tokens[-1]) + 1 + i) % 16 for i in range(G)]
