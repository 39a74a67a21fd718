import math
from dataclasses import replace

import pytest
import torch

from tercel.core.sampling import RowSampling
from tercel.core.step import Row, StepPlan
from tercel.parallel import SingleGroup, run_threads
from tercel.runtime.sampler import Sampler
from tests.runtime.steps import drawn

CPU = torch.device("cpu")
VOCAB = 32
DRAWN = RowSampling(seed=5, temperature=1.0)


def logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def plan_of(*samplings, position=9):
    return StepPlan(
        verify=tuple(
            Row(str(index), (1,), position - 1, index + 1, (1,), sampling=sampling)
            for index, sampling in enumerate(samplings)
        )
    )


def results(sampler, values, plan):
    return drawn(sampler, values, plan)


def run(values, *samplings, illegal=(), position=9):
    sampler = Sampler(SingleGroup(), illegal, CPU)
    return results(sampler, values, plan_of(*samplings, position=position))


def tokens(values, *samplings, **options):
    return [row.tokens[0] for row in run(values, *samplings, **options)]


def test_greedy_and_illegal():
    values = logits(3)
    best = values.argmax(-1).tolist()
    assert tokens(values, *[RowSampling()] * 3) == best
    second = values.topk(2).indices[0, 1].item()
    assert tokens(values, *[RowSampling()] * 3, illegal=[best[0]])[0] == second


def test_a_draw_depends_on_seed_and_position_only():
    values = logits(1).expand(4, VOCAB)
    alone = tokens(values[:1], DRAWN)
    assert tokens(values, replace(DRAWN, seed=1), DRAWN, RowSampling(), DRAWN)[1::2] == alone * 2
    others = {tokens(values[:1], DRAWN, position=position)[0] for position in range(40)}
    assert len(others) > 5


def test_shards_draw_what_the_whole_vocabulary_draws():
    values = logits(4)
    rows = (
        DRAWN,
        RowSampling(logprobs=3),
        replace(DRAWN, seed=8, top_k=4, bias=((3, 9.0),)),
        replace(DRAWN, repetition_penalty=1.5, history=((1, 2), (30, 1))),
    )
    whole = run(values, *rows, illegal=[7, 31])

    def shard(group):
        part = values.chunk(group.world_size, dim=-1)[group.rank].clone()
        return results(Sampler(group, [7, 31], CPU), part, plan_of(*rows))

    for parts in run_threads(4, shard):
        assert parts == whole


def test_temperature_and_filters_reach_the_op():
    values = logits(1)
    best = values.topk(3).indices[0].tolist()
    seeds = range(60)
    assert {tokens(values, replace(DRAWN, seed=s, top_k=3))[0] for s in seeds} == set(best)
    cold = {tokens(values, replace(DRAWN, seed=s, temperature=0.01))[0] for s in seeds}
    assert cold == {best[0]}


def test_penalties_and_bias():
    values = torch.zeros(1, VOCAB)
    values[0, 3], values[0, 4], values[0, 5] = 5.0, 4.5, 4.0

    def best(**options):
        return tokens(values, RowSampling(**options))[0]

    assert best() == 3
    assert best(repetition_penalty=2.0, history=((3, 0),)) == 4
    assert best(presence_penalty=2.0, history=((3, 1), (4, 1))) == 5
    assert best(presence_penalty=2.0, history=((3, 0),)) == 3
    assert best(frequency_penalty=0.6, history=((3, 1), (4, 1))) == 3
    assert best(frequency_penalty=0.6, history=((3, 2), (4, 1))) == 5
    assert best(bias=((6, 6.0),)) == 6
    assert best(bias=((3, -math.inf), (4, -math.inf))) == 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_reported_alone(value):
    values = logits(3)
    expected = tokens(values, DRAWN, DRAWN, DRAWN)
    values[1, 20] = value
    first, broken, last = run(values, DRAWN, replace(DRAWN, logprobs=2), DRAWN, illegal=())
    assert (broken.is_finite, broken.tokens, broken.logprobs) == (False, (), ())
    assert [first.tokens[0], last.tokens[0]] == [expected[0], expected[2]]


def test_logprobs_are_those_before_penalties():
    values = logits(3)
    rows = (
        RowSampling(),
        RowSampling(logprobs=0, bias=((3, 50.0),)),
        replace(DRAWN, temperature=5.0, logprobs=2),
    )
    none, chosen, best = run(values, *rows, illegal=[9])
    values[:, 9] = -math.inf
    expected = values.log_softmax(-1)
    assert none.logprobs == ()
    assert (chosen.tokens, chosen.logprobs[0].token, chosen.logprobs[0].top) == ((3,), 3, ())
    assert chosen.logprobs[0].logprob == pytest.approx(expected[1, 3].item(), abs=1e-5)
    assert chosen.logprobs[0].rank == 1 + int((expected[1] > expected[1, 3]).sum())
    ids, found = zip(*best.logprobs[0].top, strict=True)
    assert list(ids) == expected[2].topk(2).indices.tolist()
    assert list(found) == pytest.approx(expected[2].topk(2).values.tolist(), abs=1e-5)
