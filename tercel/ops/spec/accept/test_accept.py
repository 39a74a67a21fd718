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
from tercel.core.sampling import Stream
from tercel.errors import CheckFailed
from tercel.ops.sampling.sample import sample
from tercel.ops.spec.accept import CONTRACT, accept
from tercel.ops.spec.accept import portable as fast
from tercel.parallel import run_threads
from tests.interpreter import INTERPRETED, REASON, implementations

GREEDY, MATCH, TOKEN, BLOCK, CERTAIN, _ = CONTRACT.cells
PORTABLE = accept.portable.name
EVERY = implementations(accept, "reference", "portable")
FEW = {"R": 4, "G": 2, "V": 200}
FEW_DRAWN = Cell("few ids, drawn", **FEW, kind="drawn", rule="token", ragged=True)
FEW_GREEDY = Cell("few ids, greedy", **FEW, kind="greedy", rule="match", ragged=True)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell):
    for seed in range(2):
        check_cell(accept, cell, PORTABLE, seed=seed)


@pytest.mark.parametrize("cell", CONTRACT.cells[:5], ids=str)
def test_meta(cell):
    check_meta(accept, cell, PORTABLE)


@pytest.mark.parametrize("cell", CONTRACT.cells[:5], ids=str)
def test_replay(cell):
    check_replay(accept, cell, PORTABLE)


def shard(arguments, group):
    """A rank's arguments: its part of the vocabulary."""
    result = {**arguments, "group": group}
    for name in ("logits", "draft_logits"):
        if arguments[name] is not None:
            part = arguments[name].chunk(group.world_size, -1)[group.rank]
            result[name] = part.contiguous()
    return result


@pytest.mark.parametrize("world", [2, 16])
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ranks_decide_as_one_does(cell, world):
    arguments = draw(accept, cell, dtype=torch.float32)
    whole = accept(**arguments)
    for result in run_threads(world, lambda group: accept(**shard(arguments, group))):
        assert all(torch.equal(x, y) for x, y in zip(result, whole, strict=True))


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("rule", ["match", "token", "block"])
def test_a_request_without_drafts_draws_as_plain_decoding_does(rule, implementation):
    arguments = draw(accept, FEW_DRAWN, dtype=torch.float32)
    arguments |= {"rule": rule, "filtered": False}
    arguments["num_drafts"][::2] = 0
    tokens, accepted, _ = accept.using(implementation)(**arguments)
    requests, slots = arguments["drafts"].shape
    first = arguments["logits"].view(requests, slots + 1, -1)[:, 0].contiguous()
    filters = {name: arguments[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    seeds, positions = arguments["seeds"], arguments["positions"] + 1
    options = {"stream": int(Stream.TARGET), "filtered": False}
    plain, _ = sample(first, **filters, seeds=seeds, positions=positions, **options)
    assert bool((accepted[::2] == 0).all())
    assert torch.equal(tokens[::2, -1], plain[::2])


def test_greedy_ranks_exchange_one_pair_per_row():
    arguments = draw(accept, GREEDY, dtype=torch.float32)
    sizes = []

    class Counting(SingleGroup):
        world_size = 2

        def all_gather(self, x, dim=0):
            sizes.append(x.numel())
            return torch.cat((x, x), dim)

    accept(**{**arguments, "group": Counting()})
    assert sizes == [2 * arguments["logits"].shape[0]]


@pytest.mark.parametrize("implementation", EVERY)
def test_greedy_ties_go_to_the_lower_id_on_any_rank(implementation):
    arguments = draw(accept, GREEDY, dtype=torch.float32)
    arguments["logits"][:, [7, 640, 1279]] = 50.0
    arguments["drafts"].fill_(7)
    run = accept.using(implementation)
    for result in run_threads(2, lambda group: run(**shard(arguments, group))):
        assert torch.equal(result[1], arguments["num_drafts"])
        assert bool((result[0] == 7).all())


@pytest.mark.parametrize("rule", ["match", "token", "block"])
@pytest.mark.parametrize("implementation", EVERY)
def test_temperature_zero_is_greedy_under_every_rule(rule, implementation):
    arguments = draw(accept, FEW_GREEDY, dtype=torch.float32)
    expected = accept(**arguments)
    run = accept.using(implementation)
    result = run(**{**arguments, "rule": rule, "greedy": False})
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_sample_match_draws_what_op_sample_draws():
    """So the text is that of plain decoding with the same seeds."""
    a = draw(accept, MATCH, dtype=torch.float32)
    tokens, accepted, _ = accept(**a)
    requests, slots = a["drafts"].shape
    rows = {
        name: a[name].repeat_interleave(slots + 1)
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds")
    }
    where = (a["positions"][:, None] + 1 + torch.arange(slots + 1)).flatten()
    own, _ = sample(a["logits"], **rows, positions=where, stream=int(Stream.TARGET), filtered=True)
    own = own.view(requests, -1)
    for r in range(requests):
        count = int(accepted[r])
        assert torch.equal(tokens[r, : count + 1], own[r, : count + 1])
        assert count == slots or own[r, count] != a["drafts"][r, count]


@pytest.mark.parametrize("cell", [GREEDY, MATCH, TOKEN], ids=str)
def test_what_was_rejected_does_not_matter(cell):
    """Behind the first rejection neither drafts nor logits change anything."""
    a = draw(accept, cell, dtype=torch.float32)
    expected = accept(**a)
    slot = torch.arange(a["drafts"].shape[1])
    behind = slot > expected[1][:, None]
    a["drafts"] = a["drafts"].masked_fill(behind, 3)
    rows = a["logits"].view(*a["drafts"].shape[:1], -1, a["logits"].shape[1])
    rows[:, 1:][behind] = 1.0
    assert all(torch.equal(x, y) for x, y in zip(accept(**a), expected, strict=True))


def test_rows_do_not_depend_on_their_batch():
    a = draw(accept, BLOCK, dtype=torch.float32)
    whole = accept(**a)
    requests, slots = a["drafts"].shape
    per_row = {"logits": slots + 1, "draft_logits": slots}
    for r in (0, 3, 7):
        one = dict(a)
        for name, value in a.items():
            if isinstance(value, torch.Tensor):
                rows = per_row.get(name, 1)
                one[name] = value[r * rows : (r + 1) * rows]
        for alone, together in zip(accept(**one), whole, strict=True):
            assert torch.equal(alone[0], together[r])
    assert requests == 8


@pytest.mark.parametrize("cell", [FEW_GREEDY, MATCH, FEW_DRAWN], ids=str)
@pytest.mark.parametrize("implementation", EVERY)
def test_a_request_that_is_not_finite_disturbs_no_other(cell, implementation):
    """It ends at its first such row, if it gets there, with token 0."""
    a = draw(accept, cell, dtype=torch.float32)
    run = accept.using(implementation)
    expected = run(**a)
    width = a["drafts"].shape[1] + 1
    for bad in (0, 1, width - 1):
        logits = a["logits"].clone()
        logits[3 * width + bad, 5] = float("nan")
        tokens, accepted, finite = run(**{**a, "logits": logits})
        reached = int(expected[1][3]) >= bad
        assert bool(finite[3]) != reached
        if reached:
            assert int(accepted[3]) == bad and int(tokens[3, bad]) == 0
        others = [r for r in range(len(accepted)) if r != 3 or not reached]
        for x, y in zip((tokens, accepted, finite), expected, strict=True):
            assert torch.equal(x[others], y[others])


ROUNDS, VOCABULARY, SLOTS = 10000, 12, 3


def rounds(rule, drafts_stream):
    """`ROUNDS` requests with one target and one drafter; drafts drawn from `drafts_stream`."""
    generator = torch.Generator().manual_seed(0)
    shape = SLOTS + 1, VOCABULARY
    target = torch.randn(shape, generator=generator) * 1.5
    drafter = target[:SLOTS] + torch.randn(SLOTS, VOCABULARY, generator=generator)
    seeds, zero = torch.arange(ROUNDS), torch.zeros(ROUNDS)
    off = {"top_k": zero.long(), "top_p": zero + 1, "min_p": zero, "temperature": zero + 1}
    drafts = [
        sample(
            drafter[slot].expand(ROUNDS, -1).contiguous(),
            **off,
            seeds=seeds,
            positions=zero.long() + 41,
            stream=int(drafts_stream) + slot,
            filtered=False,
        )[0]
        for slot in range(SLOTS)
    ]
    tokens, accepted, _ = accept(
        target.repeat(ROUNDS, 1),
        torch.stack(drafts, 1),
        drafter.repeat(ROUNDS, 1),
        torch.full((ROUNDS,), SLOTS),
        **off,
        seeds=seeds,
        positions=zero.long() + 41,
        group=SingleGroup(),
        rule=rule,
        filtered=False,
    )
    return tokens, accepted, torch.softmax(target.double(), -1)


def chi_square(tokens, probabilities):
    expected = len(tokens) * probabilities
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize(("rule", "places"), [("match", 2), ("token", 3), ("block", 1)])
def test_what_comes_out_is_distributed_as_the_target(rule, places):
    """At each place, over the requests that get there; 42 is the 1e-5 point of 11 degrees. Whether
    a block gets to its second place depends on what is drafted there."""
    tokens, accepted, target = rounds(rule, Stream.DRAFT)
    for place in range(places):
        here = tokens[accepted >= place, place]
        assert len(here) > 1000 and chi_square(here, target[place]) < 42


@pytest.mark.parametrize(("rule", "least"), [("token", 1000), ("block", 50)])
def test_control_drafts_that_share_the_numbers_of_their_acceptance(rule, least):
    """50 is the 1e-6 point."""
    tokens, _, target = rounds(rule, Stream.ACCEPT)
    assert chi_square(tokens[:, 0], target[0]) > least


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(logits=a["logits"][:-1]),
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(draft_logits=a["draft_logits"][:, :-1].contiguous()),
        lambda a: a.update(num_drafts=a["num_drafts"].int()),
        lambda a: a.update(rule="greedy"),
        lambda a: a.update(greedy=0),
    ],
    ids=["a row less", "bf16", "another vocabulary", "i32", "another rule", "flag"],
)
def test_refuses(change):
    check_refusal(accept, TOKEN, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a["drafts"].fill_(1280),
        lambda a: a["num_drafts"].fill_(8),
        lambda a: a["temperature"].fill_(-1.0),
        lambda a: a.update(filtered=False),
        lambda a: a.update(greedy=True),
    ],
    ids=["drafts", "num_drafts", "temperature", "filtered", "greedy"],
)
def test_invalid_values(change):
    check_invalid(accept, BLOCK, change)


def test_control_every_draft_counts():
    def broken(drafts, num_drafts, **rest):
        full = torch.full_like(num_drafts, drafts.shape[1])
        return fast.accept(drafts=drafts, num_drafts=full, **rest)

    check_control(accept, GREEDY, broken, steps=4)


def test_control_residual_of_the_row_before():
    def broken(logits, drafts, **rest):
        tokens, accepted, finite = fast.accept(logits=logits, drafts=drafts, **rest)
        row = (accepted - 1).clamp_min(0) + torch.arange(len(accepted)) * (drafts.shape[1] + 1)
        tokens[:, -1] = logits[row].argmax(-1)
        return tokens, accepted, finite

    check_control(accept, GREEDY, broken, steps=4)


def test_control_block_thresholds_of_token_rejection():
    def broken(rule, **rest):
        return fast.accept(rule="token", **rest)

    check_control(accept, BLOCK, broken, steps=8)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Stages as launches of their own; that they meet in one launch is certified on a GPU."""

    @pytest.mark.parametrize(
        ("kind", "rule"),
        [
            ("greedy", "token"),
            ("drawn", "match"),
            ("drawn", "token"),
            ("certain", "block"),
            ("filtered", "block"),
        ],
    )
    def test_cells(self, kind, rule):
        cell = Cell("few ids", **FEW, kind=kind, rule=rule, ragged=True)
        check_cell(accept, cell, "triton", seed=1)

    @pytest.mark.parametrize(
        ("kind", "rule"), [("greedy", "match"), ("drawn", "match"), ("drawn", "block")]
    )
    def test_parts(self, kind, rule, monkeypatch):
        """Three programs per request, of a tile or two each."""
        from tercel.ops.spec.accept.stages import kernel_drawn, kernel_greedy

        monkeypatch.setattr(kernel_greedy, "BLOCK", 64)
        for name, value in {"TILE": 32, "PROGRAMS": 2}.items():
            monkeypatch.setattr(kernel_drawn, name, value)
        cell = Cell("in parts", **{**FEW, "R": 2}, kind=kind, rule=rule)
        check_cell(accept, cell, "triton")

    def test_replay(self):
        check_replay(accept, FEW_DRAWN, "triton")

    @pytest.mark.parametrize("name", ["ACCEPT", "RESIDUAL"])
    def test_control_numbers_of_another_stream(self, name, monkeypatch):
        import triton.language as tl

        from tercel.ops.spec.accept.stages import kernel_rejection

        monkeypatch.setattr(kernel_rejection, name, tl.constexpr(1 << 20))
        with pytest.raises(CheckFailed):
            for seed in range(6):
                check_cell(accept, FEW_DRAWN, "triton", seed=seed)
