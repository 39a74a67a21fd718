"""The decode steps of a graph runner on a CPU, where capturing tapes the work and replays it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tercel.core.cache import ModelCache
from tercel.core.inputs import build_inputs
from tercel.core.sampling import Draws, RowSampling
from tercel.core.step import Row, StepClass, StepPlan, TokenLimits
from tercel.errors import EngineError
from tercel.parallel import SingleGroup
from tercel.runtime.fixed_inputs import FixedInputs, StepSize, smallest
from tercel.runtime.graphs import GraphRunner, no_compilation, step_sizes
from tercel.runtime.sampler import Sampler
from tercel.runtime.step_work import StepWork
from tests.interpreter import HAS_TRITON
from tests.tape import TapeCapture
from tests.targets.models import PAGE, Session, program, tokens

CPU = torch.device("cpu")
SIZES = [
    StepSize(rows, 1, pages, draws=draws)
    for rows in (1, 2, 4)
    for pages in (2, 8)
    for draws in (Draws.GREEDY, None)
]
WARM = RowSampling(seed=9 << 50, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)


def rows(count):
    """Of three pages each at most."""
    return tuple(
        Row(f"r{i}", (7 + i,), 16 + i, slot=1 + i, pages=tuple(range(1 + i, 4 + i)))
        for i in range(count)
    )


def parts(inputs):
    """Every tensor but the block table, by name."""
    of_step = {"num_prefill_tokens", "prefill", "verify", "draws"}
    found = {name: value for name, value in vars(inputs).items() if name not in of_step}
    for part in (inputs.verify, inputs.draws):
        found |= {f"{type(part).__name__}.{name}": value for name, value in vars(part).items()}
    return {name: value for name, value in found.items() if not name.endswith("block_table")}


@pytest.mark.parametrize("size", [StepSize(4, 1, 8), StepSize(2, 3, 3), StepSize(1, 1, 3)])
def test_fixed_inputs_are_those_of_the_plan(size):
    largest = StepSize(4, 3, 8)
    fixed = FixedInputs([size, largest], page_size=PAGE, device=CPU)
    fixed._device.fill_(77)
    views = fixed.of(size, WARM_KIND := Draws.FILTERED)
    (row,) = rows(1)
    row = replace(row, sampling=WARM, pending=size.width - 1, num_drafts=min(size.width - 1, 1))
    row = replace(row, tokens=(11, 12)[: size.width])
    plan = StepPlan(verify=(row,)).padded(size.rows, size.width, PAGE)
    assert plan.kind is WARM_KIND
    fixed.fill(plan, size)
    expected = build_inputs(plan, page_size=PAGE, device=CPU)
    ours, theirs = parts(views), parts(expected)
    assert ours.keys() == theirs.keys() and len(ours) > 15
    for name, value in ours.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, theirs[name]), name
    table = expected.verify.block_table
    for found in (views.verify.block_table, views.draws.block_table):
        assert torch.equal(found[:, : table.shape[1]], table)
        assert not found[:, table.shape[1] :].any()


def test_sizes_reach_what_the_engine_needs():
    found = step_sizes(5, 100, TokenLimits())
    assert {size.width for size in found} == {1} and {size.num_drafts for size in found} == {0}
    assert {size.draws for size in found} == {*Draws, None}
    assert {size.rows for size in found} == {1, 2, 4, 8}
    assert {size.pages for size in found} == {16, 64, 100}
    assert {size.pages for size in step_sizes(64, 3, TokenLimits())} == {16}
    assert max(size.rows for size in step_sizes(500, 3, TokenLimits())) == 64


def test_sizes_of_drafting_steps_hold_what_a_step_verifies():
    guesses = {1: 7, 2: 7, 4: 7, 8: 7, 16: 3, 32: 1, 64: 0}
    found = step_sizes(64, 3, TokenLimits(), guesses=guesses.get, drafts=True)
    wide = {(size.rows, size.width) for size in found if size.width > 1}
    assert wide == {(rows, 1 + count) for rows, count in guesses.items() if count}
    assert {(size.rows, size.num_drafts) for size in found} == set(guesses.items())
    suffix = step_sizes(4, 3, TokenLimits(), guesses=guesses.get)
    assert {(size.width, size.num_drafts) for size in suffix} == {(1, 0), (8, 0)}


class Fake:
    """Logits are the tokens; notes what it runs."""

    def __init__(self):
        self.counts = Counter()
        self.ran = []

    def run(self, inputs, cache, step_class):
        assert step_class is StepClass.DECODE
        self.counts["head:lm_head:portable"] += 1
        self.ran.append(len(inputs.tokens))
        return inputs.tokens[inputs.sample_rows].float().unsqueeze(1).repeat(1, 2)


def runner(program, cache=None, capture=None, sizes=SIZES):
    work = StepWork(program, cache or ModelCache({}, {}), Sampler(SingleGroup(), [], CPU))
    where = {"page_size": PAGE, "device": CPU}
    return GraphRunner(work, sizes, capture=capture or TapeCapture(), **where)


def test_a_step_takes_the_smallest_size_that_holds_it():
    graphs = runner(Fake())
    assert len(graphs) == len(SIZES)
    sizes = [graphs.size_of(StepPlan(verify=rows(count))) for count in (1, 3, 4, 5)]
    assert sizes == [StepSize(1, 1, 8), StepSize(4, 1, 8), StepSize(4, 1, 8), None]
    prefill = StepPlan(prefill=rows(1), verify=rows(1))
    assert graphs.size_of(prefill) is None
    long = StepPlan(verify=(Row("a", (1,), 8 * PAGE, 1, tuple(range(9))),))
    assert graphs.size_of(long) is None


def test_the_size_says_how_a_step_draws():
    sizes = step_sizes(2, 3, TokenLimits(), guesses=lambda rows: 2, drafts=True)
    (row,) = rows(1)
    verify = replace(row, tokens=(1, 2, 3), num_drafts=2)

    def size_of(row, num_drafts=2):
        plan = StepPlan(verify=(row,), num_drafts=num_drafts)
        return smallest(sizes, plan, PAGE)

    assert size_of(row) == StepSize(1, 1, 16, 2, Draws.GREEDY)
    assert size_of(verify) == StepSize(1, 3, 16, 2, Draws.GREEDY)
    assert size_of(verify, num_drafts=1) is None
    assert size_of(replace(verify, sampling=WARM)).draws is Draws.FILTERED
    assert size_of(replace(verify, sampling=RowSampling(temperature=1))).draws is Draws.PLAIN
    for edit in ({"bias": ((1, 2.0),)}, {"allowed": b"1"}, {"logprobs": 0}, {"history": ((1, 1),)}):
        assert size_of(replace(verify, sampling=replace(WARM, **edit))).draws is None
    assert size_of(replace(verify, after_drafts=(WARM, WARM))).draws is None
    narrow = replace(verify, tokens=(1, 2), num_drafts=1)
    assert size_of(narrow).width == 3, "padding brings it to the width"


def test_replays_count_what_they_run_and_captures_do_not():
    def record(work):
        work()
        return lambda: None

    fake = Fake()
    graphs = runner(fake, capture=record)
    assert fake.ran[:2] == [4, 4]  # warmed, then captured, the largest first
    assert not fake.counts
    plan = StepPlan(verify=rows(3))
    for _ in range(5):
        graphs.run(plan, graphs.size_of(plan))
    assert fake.counts == {"head:lm_head:portable": 5, "step:decode:graph": 5}
    edited = StepPlan(verify=tuple(replace(x, sampling=RowSampling(logprobs=0)) for x in rows(1)))
    graphs.run(edited, graphs.size_of(edited))
    assert fake.counts["step:decode:graph_to_logits"] == 1


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_logits_and_caches_are_those_of_steps_run_op_by_op(family):
    """Two sessions, one stepped through the runner, in sizes that change along the way."""
    plain, replayed = Session(family), Session(family)
    prompts = {name: tokens(5 + i, i, family) for i, name in enumerate("abc")}
    for session in (plain, replayed):
        session.step(prefill=prompts)
    with torch.inference_mode():
        sizes = [size for size in SIZES if size.pages == 8 and size.rows != 2]
        graphs = runner(program(family), replayed.cache, sizes=sizes)
        for step, names in enumerate(("abc", "ac", "b", "abc")):
            decode = {name: tokens(1, 10 * step + i, family) for i, name in enumerate(names)}
            expected = plain.step(decode=decode)
            asked = RowSampling(logprobs=0) if step % 2 else RowSampling()
            plan = StepPlan(
                verify=tuple(replace(replayed.row(n, t), sampling=asked) for n, t in decode.items())
            )
            outcome = graphs.run(plan, graphs.size_of(plan))
            assert torch.equal(outcome.table[: len(decode), 0], expected.argmax(-1))
            if outcome.reports is not None:
                logits = outcome.reports.logits
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            for name in names:
                replayed.requests[name] += 1
    for layer, cache in plain.cache.kda.items():
        ours = replayed.cache.kda[layer].recurrent[1:]
        torch.testing.assert_close(ours, cache.recurrent[1:], rtol=1e-4, atol=1e-4)


def test_a_value_that_the_host_reads_cannot_be_taped():
    values, total = torch.tensor([1.0, 2.0]), torch.zeros(1)
    again = TapeCapture()(lambda: total.copy_(values.mul(2).sum()))
    values.fill_(5.0)
    again()
    assert total.item() == 20
    with pytest.raises(AssertionError, match="reads on the host"):
        TapeCapture()(lambda: values[: int(total)])


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_compiling_is_refused():
    from triton import knobs

    with no_compilation(), pytest.raises(EngineError, match=r"scale\[.*would be compiled"):
        knobs.runtime.jit_cache_hook(key="", repr="scale[num_warps=4]", fn=None, compile={})
    assert knobs.runtime.jit_cache_hook is None
