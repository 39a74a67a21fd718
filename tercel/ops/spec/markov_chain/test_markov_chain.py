import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
)
from tercel.contract.draw import draw
from tercel.core.group import SingleGroup
from tercel.errors import CheckFailed
from tercel.ops.spec.markov_chain import CONTRACT, markov_chain
from tercel.ops.spec.markov_chain import portable as fast
from tercel.parallel import run_threads
from tests.interpreter import INTERPRETED, REASON

GREEDY, DRAWN, DFLASH, _ = CONTRACT.cells
PORTABLE = markov_chain.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(markov_chain, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", CONTRACT.cells[:3], ids=str)
def test_meta(cell):
    check_meta(markov_chain, cell, PORTABLE)


@pytest.mark.parametrize("cell", CONTRACT.cells[:3], ids=str)
def test_replay(cell):
    check_replay(markov_chain, cell, PORTABLE)


def shard(arguments, group):
    result = {**arguments, "group": group}
    result["base"] = arguments["base"].chunk(group.world_size, 1)[group.rank].contiguous()
    if arguments["w2"] is not None:
        result["w2"] = arguments["w2"].chunk(group.world_size)[group.rank]
    return result


@pytest.mark.parametrize("world", [2, 16])
@pytest.mark.parametrize("cell", [GREEDY, DRAWN, DFLASH], ids=str)
def test_ranks_draft_as_one_does(cell, world):
    """Tokens are equal, and so are the logits but for the order of a library's sums."""
    arguments = draw(markov_chain, cell, dtype=torch.float32)
    tokens, logits = markov_chain(**arguments)
    results = run_threads(world, lambda group: markov_chain(**shard(arguments, group)))
    assert all(torch.equal(result[0], tokens) for result in results)
    torch.testing.assert_close(torch.cat([result[1] for result in results], 1), logits)


def test_ranks_exchange_a_pair_per_request_and_slot():
    arguments = draw(markov_chain, DRAWN, dtype=torch.float32)
    sizes = []

    class Counting(SingleGroup):
        world_size = 2

        def all_gather(self, x, dim=0):
            sizes.append(x.numel())
            return torch.cat((x, x), dim)

    arguments["w1"] = arguments["w1"].repeat(2, 1)
    markov_chain(**{**arguments, "group": Counting()})
    assert sizes == [2 * 3] * 3


def test_the_first_draft_follows_the_anchor_and_the_next_the_first():
    """On a head that counts: w2 @ w1[t] is largest at t + 1."""
    vocabulary, slots = 64, 5
    anchors = torch.tensor([3, 60])
    tokens, logits = markov_chain(
        torch.zeros(2 * slots, vocabulary),
        anchors,
        torch.eye(vocabulary),
        torch.eye(vocabulary).roll(1, 0) * 9,
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        group=SingleGroup(),
        num_drafts=slots,
        greedy=True,
    )
    assert tokens.tolist() == [[4, 5, 6, 7, 8], [61, 62, 63, 0, 1]]
    assert torch.equal(logits.argmax(-1), tokens.flatten())


def test_drafts_are_drawn_from_their_logits():
    """Over 20000 requests of one distribution; 42 is the 1e-5 point of 11 degrees."""
    count, vocabulary = 20000, 12
    base = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0)) * 1.5
    keys = {"seeds": torch.arange(count), "positions": torch.full((count,), 9)}
    for heat in (1.0, 0.7):
        tokens, _ = markov_chain(
            base.repeat(2 * count, 1),
            torch.zeros(count, dtype=torch.int64),
            None,
            None,
            torch.full((count,), heat),
            **keys,
            group=SingleGroup(),
            num_drafts=2,
        )
        expected = count * torch.softmax(base[0].double() / heat, 0)
        for slot in range(2):
            counts = torch.bincount(tokens[:, slot], minlength=vocabulary)
            assert float(((counts - expected).square() / expected).sum()) < 42
        # Slots have numbers of their own.
        same = float((tokens[:, 0] == tokens[:, 1]).double().mean())
        assert same == pytest.approx(float((expected / count).square().sum()), abs=0.02)


def test_a_barred_token_is_never_drafted():
    a = draw(markov_chain, DRAWN, dtype=torch.float32)
    a["base"][:, 1:] = float("-inf")
    assert not markov_chain(**a)[0].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(base=a["base"].repeat(2, 1)),
        lambda a: a.update(base=a["base"].bfloat16()),
        lambda a: a.update(w1=a["w1"][:-1]),
        lambda a: a.update(w2=a["w2"][:, :-1].contiguous()),
        lambda a: a.update(anchors=a["anchors"].int()),
        lambda a: a.update(num_drafts=5),
    ],
    ids=["rows", "bf16 logits", "w1 too short", "ranks differ", "i32 anchors", "drafts"],
)
def test_refuses(change):
    check_refusal(markov_chain, GREEDY, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a["anchors"].fill_(1280),
        lambda a: a["temperature"].fill_(-1.0),
        lambda a: a.update(greedy=True),
        lambda a: a["positions"].fill_(-1),
    ],
    ids=["anchors", "temperature", "greedy", "positions"],
)
def test_invalid_values(change):
    check_invalid(markov_chain, DRAWN, change)


def test_control_the_chain_of_the_greedy_tokens():
    """Lossless, but what is drawn is then not conditioned on what was drawn before."""

    def broken(temperature, greedy, **rest):
        _, logits = fast.markov_chain(temperature=temperature, greedy=True, **rest)
        bare = {**rest, "base": logits, "w1": None, "w2": None}
        return fast.markov_chain(temperature=temperature, greedy=False, **bare)

    check_control(markov_chain, DRAWN, broken)


def test_control_a_slot_late():
    def broken(base, num_drafts, **rest):
        rows = base.unflatten(0, (-1, num_drafts)).roll(-1, 1).flatten(0, 1)
        return fast.markov_chain(base=rows, num_drafts=num_drafts, **rest)

    check_control(markov_chain, GREEDY, broken)


def test_control_one_noise_for_every_slot(monkeypatch):
    def noise(seeds, positions, slots, first, count):
        return honest(seeds, positions, 1, first, count).expand(-1, slots, -1)

    honest = fast._noise
    monkeypatch.setattr(fast, "_noise", noise)
    check_control(markov_chain, DRAWN, fast.markov_chain)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """A launch per slot; that programs meet in one launch is certified on a GPU."""

    FEW = Cell("few ids", R=3, G=2, V=200, D=24, greedy=False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "cell",
        [
            FEW,
            DFLASH,
            Cell("greedy", R=2, G=3, V=130, D=16, greedy=True),
            Cell("more requests than a product takes", R=18, G=2, V=70, D=8, greedy=False),
        ],
        ids=str,
    )
    def test_cells(self, cell, dtype):
        check_cell(markov_chain, cell, "triton", dtype=dtype)

    def test_several_tiles_of_a_program(self, monkeypatch):
        from tercel.ops.spec.markov_chain import kernel_triton

        monkeypatch.setattr(kernel_triton, "PROGRAMS", 2)
        monkeypatch.setattr(kernel_triton, "BLOCK", kernel_triton.LEAST)
        check_cell(markov_chain, self.FEW, "triton", dtype=torch.bfloat16)

    def test_replay(self):
        check_replay(markov_chain, self.FEW, "triton")

    def test_ties_go_to_the_lower_id_of_any_program(self):
        a = draw(markov_chain, self.FEW, dtype=torch.float32)
        a |= {"base": torch.zeros_like(a["base"]), "w1": None, "w2": None, "greedy": True}
        a["base"][:, [7, 70, 199]] = 1.0
        a["base"][0, 7] = float("nan")
        tokens, _ = markov_chain.using("triton")(**{**a, "temperature": torch.zeros(3)})
        assert tokens.tolist() == [[70, 7], [7, 7], [7, 7]]

    def test_control_the_noise_of_another_stream(self, monkeypatch):
        import triton.language as tl

        from tercel.ops.spec.markov_chain import kernel_triton

        monkeypatch.setattr(kernel_triton, "FIRST_STREAM", tl.constexpr(0))
        with pytest.raises(CheckFailed):
            check_cell(markov_chain, self.FEW, "triton")
