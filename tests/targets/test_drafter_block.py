"""The drafter of blocks and ops, paged and on any number of ranks, against the reference."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tercel.blocks import sites
from tercel.blocks.drafter import (
    SITES,
    confidence,
    draft,
    run_block,
    write_context,
)
from tercel.core.cache import DrafterCache
from tercel.core.drafter import DrafterConfig, Embedding
from tercel.core.drafter_formats import drafter_config, read_drafter_config
from tercel.core.drafting import Block, DraftSampling
from tercel.core.group import Group, SingleGroup
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.parallel import run_threads
from tercel.reference.drafter import Drafter
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.drafter import dummy_drafter, load_drafter
from tercel.weights.tiny import tiny_config
from tercel.weights.tiny_drafter import tiny_drafter_config, write_random_drafter
from tests.drafters import read_vector, reference_state
from training.dspark.drafter import reference_config

PAGE, PAGES, V = 4, 40, 64
CPU = torch.device("cpu")
K = sites.table(dict(SITES))
TARGET = ModelConfig.from_dict(
    tiny_config("kimi_k3", 512, changes={"hidden_size": 64, "vocab_size": V})
)


@dataclass
class Case:
    """A drafter, the target's part of it, and three requests of so many tokens."""

    path: Path
    config: DrafterConfig
    reference: Drafter
    embed: torch.Tensor
    head: torch.Tensor
    taps: torch.Tensor
    """[3, S, taps * M]."""
    lengths: tuple[int, ...] = (21, 5, 12)
    drafts: int = 5

    def loaded(self, group: Group) -> Any:
        layout = Layout.parse(f"tp{group.world_size}")
        checkpoint = Checkpoint.open(self.path)
        options = {"dtype": torch.float32, "device": CPU, "embed": self.embed}
        return load_drafter(checkpoint, self.config, layout, group.rank, **options)

    def expected(self, lengths: tuple[int, ...], anchors: torch.Tensor) -> list[Any]:
        """Per request (hidden [g, N], draft) of the reference, which knows no cache."""
        results = []
        for row, length in enumerate(lengths):
            taps = self.taps[row, :length][None]
            given = taps, anchors[row].view(1, 1), torch.tensor([[length]]), self.drafts, self.embed
            with torch.no_grad():
                results.append(
                    (self.reference(*given)[0, 0], self.reference.draft(*given, self.head))
                )
        return results


def vector_case(name: str) -> Case:
    config, tensors, vector = read_vector(name)
    embedding = Embedding.OWN if name == "drafter_mla" else Embedding.TARGET
    reference = Drafter(reference_config(config, embedding))
    reference.load_state_dict({k: v.float() for k, v in reference_state(tensors).items()})
    taps = torch.stack([vector["taps"], vector["taps"].flip(0), vector["taps"].flip(1)])
    path = Path(__file__).parents[1] / "vectors" / name
    return Case(path, config, reference, vector["embed"], vector["head"], taps)


def written_case(path: Path, format: str, mask_row: bool, **changes: Any) -> Case:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    embed, head = normal(V, 64), normal(V, 64)
    json = tiny_drafter_config(format, TARGET, {"head_dim": 16, **changes})
    if format == "k3_dspark":
        del json["head_dim"]
    shipped = embed.clone()
    if mask_row:
        shipped[V - 2] = normal(64)
    write_random_drafter(path, json, seed=1, embed=shipped if mask_row else None)
    config = read_drafter_config(path)
    kind = Embedding.MASK_ROW if mask_row else Embedding.TARGET
    reference = Drafter(reference_config(config, kind))
    tensors = {
        name: Checkpoint.open(path).reader().tensor(name).float()
        for name in Checkpoint.open(path).tensors
    }
    tensors.pop("embed_tokens.weight", None)
    state = reference_state(tensors)
    if mask_row:
        state["mask_row"] = shipped[V - 2]
    reference.load_state_dict(state)
    return Case(path, config, reference, embed, head, normal(3, 21, 3 * 64))


CASES = ["vector gqa", "vector mla", "specforge", "mask row", "speculators", "dflash", "k3_dspark"]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    name = request.param
    if name.startswith("vector"):
        return vector_case(f"drafter_{name[-3:]}")
    if name == "speculators":
        types = ["sliding_attention", "full_attention"]
        changes = {"layer_types": types, "use_sliding_window": True, "sliding_window": 6}
        return written_case(tmp_path, "speculators", False, **changes)
    if name == "dflash":
        heads = {"markov_rank": 0, "enable_confidence_head": False}
        heads |= {"confidence_head_with_markov": False, "shift_label": False}
        return written_case(tmp_path, "specforge", False, **heads)
    return written_case(tmp_path, "specforge" if name == "mask row" else name, name == "mask row")


class Server:
    """One rank's drafter and its pages; every request's pages are scattered."""

    def __init__(self, case: Case, group: Group) -> None:
        self.case, self.group, self.w = case, group, case.loaded(group)
        shape = case.config.attention.entry_shape(group.world_size)
        layers = case.config.num_hidden_layers
        self.cache = DrafterCache(torch.full((layers, PAGES, PAGE, *shape), float("nan")))
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.table = order[:24].view(3, 8)

    def write(self, row: int, start: int, taps: torch.Tensor) -> None:
        """The context of tokens start .. of a request, as a step with these rows does."""
        positions = torch.arange(start, start + len(taps))
        slots = self.table[row][positions // PAGE] * PAGE + positions % PAGE
        write_context(K, self.group, self.w, self.case.config, taps, positions, slots, self.cache)

    def run(self, lengths: tuple[int, ...], anchors: torch.Tensor) -> dict[str, torch.Tensor]:
        block = Block(anchors, torch.tensor(lengths), self.table, self.case.drafts)
        sampling = DraftSampling(torch.zeros(3), torch.zeros(3, dtype=torch.int64), greedy=True)
        config, group, w = self.case.config, self.group, self.w
        embed, head = (
            table.chunk(group.world_size)[group.rank].contiguous()
            for table in (self.case.embed, self.case.head)
        )
        hidden = run_block(K, group, w, config, embed, block, self.cache)
        tokens, logits = draft(K, group, w, hidden, head, block, sampling)
        result = {"hidden": hidden, "tokens": tokens, "logits": group.all_gather(logits, -1)}
        if config.confidence_head:
            result["confidence"] = confidence(K, w, hidden, block, tokens)
        return result


def compare(case: Case, actual: dict[str, torch.Tensor], expected: list[Any]) -> None:
    for row, (hidden, drafted) in enumerate(expected):
        at = slice(row * case.drafts, (row + 1) * case.drafts)
        torch.testing.assert_close(actual["hidden"][at], hidden, rtol=1e-3, atol=1e-4)
        assert torch.equal(actual["tokens"][row], drafted.tokens[0, 0])
        torch.testing.assert_close(actual["logits"][at], drafted.logits[0, 0], rtol=1e-3, atol=1e-3)
        if case.config.confidence_head:
            torch.testing.assert_close(
                actual["confidence"][row], drafted.confidence[0, 0], rtol=1e-3, atol=1e-3
            )


ANCHORS = torch.tensor([7, 50, 33])


@pytest.mark.parametrize("world", [1, 2])
def test_a_block_is_the_references(case: Case, world: int) -> None:
    """Prompts are written in chunks that do not end with pages."""

    def body(group: Group) -> dict[str, torch.Tensor]:
        server = Server(case, group)
        for row, length in enumerate(case.lengths):
            for start in range(0, length, 7):
                server.write(row, start, case.taps[row, start : min(start + 7, length)])
        return server.run(case.lengths, ANCHORS)

    expected = case.expected(case.lengths, ANCHORS)
    for actual in run_threads(world, body):
        compare(case, actual, expected)


def test_rounds_with_rejected_drafts_are_fresh_requests(case: Case) -> None:
    """Each round writes the rows of the whole verify step; only the kept ones become context."""
    server = Server(case, SingleGroup())
    lengths = [4, 2, 3]
    for row, length in enumerate(lengths):
        server.write(row, 0, case.taps[row, :length])
    generator = torch.Generator().manual_seed(11)
    for kept in ((0, 5, 2), (3, 0, 1)):
        for row, count in enumerate(kept):
            rows = case.taps[row, lengths[row] : lengths[row] + 1 + case.drafts].clone()
            rows[count + 1 :] = torch.randn(rows[count + 1 :].shape, generator=generator)
            server.write(row, lengths[row], rows)
            lengths[row] += count + 1
        anchors = torch.randint(V, (3,), generator=generator)
        compare(case, server.run(tuple(lengths), anchors), case.expected(tuple(lengths), anchors))


def test_padding_requests_write_the_sink_and_draft_nothing_that_is_not_finite(case: Case) -> None:
    server = Server(case, SingleGroup())
    for row, length in enumerate(case.lengths):
        server.write(row, 0, case.taps[row, :length])
    before = server.cache.pages.clone()
    taps = case.taps[0, :3]
    zero = torch.zeros(3, dtype=torch.int64)
    write_context(
        K, server.group, server.w, case.config, taps, zero, torch.zeros_like(zero), server.cache
    )
    assert torch.equal(server.cache.pages[:, 1:].nan_to_num(7), before[:, 1:].nan_to_num(7))
    server.table = torch.zeros_like(server.table)
    assert server.run((0, 0, 0), ANCHORS)["hidden"].isfinite().all()


def test_the_taps_of_the_wrong_layers_do_not_draft_the_same() -> None:
    case = vector_case("drafter_gqa")
    server, shifted = (Server(case, SingleGroup()) for _ in range(2))
    for row, length in enumerate(case.lengths):
        server.write(row, 0, case.taps[row, :length])
        shifted.write(row, 0, case.taps[row, :length].roll(24, -1))
    right, wrong = (x.run(case.lengths, ANCHORS)["logits"] for x in (server, shifted))
    assert (right - wrong).abs().max() > 0.1


def test_narrower_blocks_and_a_temperature(tmp_path: Path) -> None:
    case = replace(written_case(tmp_path, "specforge", False), drafts=2)
    server = Server(case, SingleGroup())
    for row, length in enumerate(case.lengths):
        server.write(row, 0, case.taps[row, :length])
    compare(case, server.run(case.lengths, ANCHORS), case.expected(case.lengths, ANCHORS))


@pytest.mark.parametrize("format", ["specforge", "k3_dspark"])
def test_a_block_reads_nothing_on_the_host(format: str) -> None:
    config = drafter_config(tiny_drafter_config(format, TARGET))
    meta = torch.device("meta")
    w = dummy_drafter(config, Layout(), 0, dtype=torch.bfloat16, device=meta)
    group, shape = SingleGroup(), config.attention.entry_shape(1)
    with meta:
        cache = DrafterCache(torch.empty(2, PAGES, 64, *shape, dtype=torch.bfloat16))
        taps, table = torch.empty(24, 3 * 64, dtype=torch.bfloat16), torch.empty(V, 64).bfloat16()
        tokens = torch.empty(24, dtype=torch.int64)
        write_context(K, group, w, config, taps, tokens, tokens, cache)
        requests = torch.empty(3, dtype=torch.int64)
        block = Block(requests, requests, torch.empty(3, 4, dtype=torch.int64), 7)
        hidden = run_block(K, group, w, config, table, block, cache)
        sampling = DraftSampling(torch.empty(3), requests, greedy=False)
        drafts, logits = draft(K, group, w, hidden, table, block, sampling)
        assert confidence(K, w, hidden, block, drafts).shape == (3, 7)
    assert (drafts.shape, logits.shape, logits.dtype) == ((3, 7), (21, V), torch.float32)
