"""The decode steps of a graph runner on a CPU, where capturing keeps the work and replays it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tercel.core.cache import ModelCache
from tercel.core.inputs import build_inputs
from tercel.core.step import Row, StepClass, StepPlan, TokenLimits
from tercel.errors import EngineError
from tercel.runtime.fixed_inputs import FixedInputs, StepSize
from tercel.runtime.graphs import GraphRunner, no_compilation, step_sizes
from tests.interpreter import HAS_TRITON
from tests.targets.models import PAGE, Session, program, tokens

CPU = torch.device("cpu")
SIZES = [StepSize(rows, 1, pages) for rows in (1, 2, 4) for pages in (2, 8)]


def rows(count):
    return tuple(
        Row(f"r{i}", (7 + i,), context_len=3 + 5 * i, slot=1 + i, pages=tuple(range(1 + i, 4 + i)))
        for i in range(count)
    )


def fields(inputs):
    verify = inputs.verify
    return [
        inputs.tokens,
        inputs.slot_mapping,
        inputs.sample_rows,
        verify.slots,
        verify.context_lens,
        verify.pending,
    ]


@pytest.mark.parametrize("size", [StepSize(4, 1, 8), StepSize(2, 3, 3), StepSize(1, 1, 3)])
def test_fixed_inputs_are_those_of_the_plan(size):
    fixed = FixedInputs(StepSize(4, 3, 8), page_size=PAGE, device=CPU)
    fixed.fill(StepSize(4, 3, 8).idle(), StepSize(4, 3, 8))
    views = fixed.of(size)
    width = (11,) * size.width
    plan = StepPlan(
        verify=tuple(replace(row, tokens=width, pending=size.width - 1) for row in rows(1))
    ).padded(size.rows)
    fixed.fill(plan, size)
    expected = build_inputs(plan, page_size=PAGE, device=CPU)
    for ours, theirs in zip(fields(views), fields(expected), strict=True):
        assert torch.equal(ours, theirs)
    table = expected.verify.block_table
    assert torch.equal(views.verify.block_table[:, : table.shape[1]], table)
    assert not views.verify.block_table[:, table.shape[1] :].any()
    assert views.verify.width == size.width


def test_sizes_reach_what_the_engine_needs():
    found = step_sizes(5, 100, TokenLimits())
    assert {size.rows for size in found} == {1, 2, 4, 8}
    assert {size.pages for size in found} == {16, 64, 100}
    assert {size.pages for size in step_sizes(64, 3, TokenLimits())} == {16}
    assert max(size.rows for size in step_sizes(500, 3, TokenLimits())) == 64


class Fake:
    """Logits are the tokens; notes what it runs."""

    def __init__(self):
        self.counts = Counter()
        self.ran = []

    def run(self, inputs, cache, step_class):
        assert step_class is StepClass.DECODE
        self.counts["head:lm_head:portable"] += 1
        self.ran.append(len(inputs.tokens))
        return inputs.tokens[inputs.sample_rows].float().unsqueeze(1).expand(-1, 2)


def keep(work):
    return work


def runner(program, cache=None, capture=keep):
    cache = cache or ModelCache({}, {})
    return GraphRunner(program, cache, SIZES, page_size=PAGE, device=CPU, capture=capture)


def test_a_step_takes_the_smallest_size_that_holds_it():
    graphs = runner(Fake())
    assert len(graphs) == len(SIZES)
    sizes = [graphs.size_of(StepPlan(verify=rows(count))) for count in (1, 3, 4, 5)]
    assert sizes == [StepSize(1, 1, 8), StepSize(4, 1, 8), StepSize(4, 1, 8), None]
    prefill = StepPlan(prefill=rows(1), verify=rows(1))
    assert graphs.size_of(prefill) is None
    long = StepPlan(verify=(Row("a", (1,), 0, 1, tuple(range(9))),))
    assert graphs.size_of(long) is None


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
    assert fake.counts == {"head:lm_head:portable": 5}


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_logits_and_caches_are_those_of_steps_run_op_by_op(family):
    """Two sessions, one stepped through the runner, in sizes that change along the way."""
    plain, replayed = Session(family), Session(family)
    prompts = {name: tokens(5 + i, i, family) for i, name in enumerate("abc")}
    for session in (plain, replayed):
        session.step(prefill=prompts)
    with torch.inference_mode():
        graphs = runner(program(family), replayed.cache)
        for step, names in enumerate(("abc", "ac", "b", "abc")):
            decode = {name: tokens(1, 10 * step + i, family) for i, name in enumerate(names)}
            expected = plain.step(decode=decode)
            plan = StepPlan(verify=tuple(replayed.row(n, t) for n, t in decode.items()))
            logits = graphs.run(plan, graphs.size_of(plan))[: len(decode)]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            for name in names:
                replayed.requests[name] += 1
    for layer, cache in plain.cache.kda.items():
        ours = replayed.cache.kda[layer].recurrent[1:]
        torch.testing.assert_close(ours, cache.recurrent[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_compiling_is_refused():
    from triton import knobs

    with no_compilation(), pytest.raises(EngineError, match=r"scale\[.*would be compiled"):
        knobs.runtime.jit_cache_hook(key="", repr="scale[num_warps=4]", fn=None, compile={})
    assert knobs.runtime.jit_cache_hook is None
