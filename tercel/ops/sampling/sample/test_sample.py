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
from tercel.ops.sampling.sample import CONTRACT, sample
from tests.interpreter import implementations

GREEDY, PLAIN, FILTERED = CONTRACT.cells[:3]
PORTABLE = sample.portable.name
TESTED = implementations(sample)
EVERY = implementations(sample, "reference", "portable")
PARTS = Cell("a vocabulary of several parts", S=5, V=5000, kind="plain")
FEW = Cell("several parts, few rows with filters", S=3, V=2500, kind="filtered")
SMALL = (GREEDY, PLAIN, CONTRACT.cells[3], PARTS, FEW)
CALLS = [
    *(pytest.param(cell, PORTABLE, id=f"{PORTABLE}-{cell}") for cell in (*CONTRACT.cells, PARTS)),
    *(
        pytest.param(*(cell, *kernel.values), marks=kernel.marks, id=f"triton-{cell}")
        for kernel in TESTED[1:]
        for cell in SMALL
    ),
]
"""Interpreted, a row that filters takes a second."""
PROBABILITIES = torch.tensor([0.3, 0.02, 0.2, 0.001, 0.15, 0.12, 0.1, 0.06, 0.04, 0.009])
DRAWS = 20000


def draw_many(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stream=0):
    """Tokens of DRAWS positions of one request over PROBABILITIES."""
    full = lambda value: torch.full((DRAWS,), value)  # noqa: E731
    tokens, finite = sample(
        PROBABILITIES.log().expand(DRAWS, -1).contiguous(),
        full(temperature),
        full(top_k),
        full(top_p),
        full(min_p),
        full(17),
        torch.arange(DRAWS),
        stream=stream,
        filtered=(top_k, top_p, min_p) != (0, 1.0, 0.0),
    )
    assert finite.all()
    return tokens


def chi_square(tokens, probabilities):
    kept = probabilities > 0
    expected = DRAWS * probabilities[kept] / probabilities.sum()
    counts = torch.bincount(tokens, minlength=len(probabilities))
    assert counts[~kept].sum() == 0, "a token outside the filters was drawn"
    return float(((counts[kept] - expected).square() / expected).sum())


@pytest.mark.parametrize(("cell", "implementation"), CALLS)
def test_cells(cell, implementation):
    check_cell(sample, cell, implementation)


@pytest.mark.parametrize("cell", [GREEDY, PLAIN, FILTERED], ids=str)
def test_meta(cell):
    check_meta(sample, cell, PORTABLE)


@pytest.mark.parametrize("cell", [PLAIN, FEW], ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_replay(cell, implementation):
    check_replay(sample, cell, implementation)


# Kept tokens are chosen by hand; thresholds are the 99.9 % points of chi-square.
@pytest.mark.parametrize(
    ("options", "kept", "threshold"),
    [
        ({}, range(10), 27.9),
        ({"top_k": 4}, [0, 2, 4, 5], 16.3),
        ({"top_k": 1}, [0], 0.0),
        ({"top_p": 0.6}, [0, 2, 4], 13.8),
        ({"top_k": 4, "top_p": 0.6}, [0, 2], 10.8),
        ({"min_p": 0.25}, [0, 2, 4, 5, 6], 18.5),
        ({"top_k": 6, "top_p": 0.9, "min_p": 0.35}, [0, 2, 4, 5], 16.3),
    ],
    ids=str,
)
def test_distribution(options, kept, threshold):
    target = torch.zeros(10)
    target[list(kept)] = PROBABILITIES[list(kept)]
    assert chi_square(draw_many(**options), target) <= threshold


def test_distribution_follows_the_temperature():
    assert chi_square(draw_many(temperature=2.0), PROBABILITIES.sqrt()) < 27.9


def test_streams_are_different_draws():
    first, second = draw_many(stream=0), draw_many(stream=1)
    agreement = float((first == second).double().mean())
    assert agreement == pytest.approx(float(PROBABILITIES.square().sum()), abs=0.02)


@pytest.mark.parametrize("implementation", EVERY)
def test_greedy_ties_go_to_the_lower_id(implementation):
    arguments = draw(sample, GREEDY, dtype=torch.float32)
    arguments["logits"][0, [7, 400, 1279]] = 50.0
    tokens, _ = sample.using(implementation)(**arguments)
    assert tokens.tolist() == [7]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    "fill", [float("nan"), float("inf"), None], ids=["nan", "inf", "nothing allowed"]
)
def test_a_row_that_is_not_finite_disturbs_no_other(fill, implementation):
    run = sample.using(implementation)
    arguments = draw(sample, FEW, dtype=torch.float32)
    expected, _ = run(**arguments)
    if fill is None:
        arguments["logits"][1] = float("-inf")
    else:
        arguments["logits"][1, 77] = fill
    tokens, finite = run(**arguments)
    assert finite.tolist() == [row != 1 for row in range(3)]
    expected[1] = 0
    assert torch.equal(tokens, expected)


def test_a_barred_token_is_never_drawn():
    arguments = draw(sample, PLAIN, dtype=torch.float32)
    arguments["logits"][:, 1:] = float("-inf")
    tokens, finite = sample(**arguments)
    assert finite.all() and tokens.tolist() == [0] * 8


def test_rows_do_not_depend_on_their_batch():
    arguments = draw(sample, PLAIN, dtype=torch.float32)
    whole, _ = sample(**arguments)
    batch = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    for row in range(8):
        alone = {n: v[row : row + 1] for n, v in batch.items()}
        assert sample(**{**arguments, **alone})[0] == whole[row]
    others = {n: v[[5, 2, 7, 1]] for n, v in batch.items()}
    others["top_k"][[0, 2]] = 3
    others["top_p"][3] = 0.5
    mixed, _ = sample(**{**arguments, **others, "filtered": True})
    assert mixed[1] == whole[2], "a neighbour's filter changed the draw"


@pytest.mark.parametrize("implementation", TESTED)
def test_filters_keep_what_equals_the_smallest(implementation):
    """Of masses 8, 7, three ones and less, which are 22.2 together: a row per filter."""
    masses = torch.tensor([0.6, 1.0, 0.7, 8.0, 0.8, 1.0, 0.5, 7.0, 0.9, 0.4, 1.0, 0.3])
    filters = [(1, 1.0, 1), (3, 1.0, 5), (0, 0.35, 1), (0, 0.65, 2), (0, 0.7, 5), (4, 0.999, 5)]
    top_k, top_p, kept = zip(*filters, strict=True)
    rows = len(filters)
    arguments = {
        "logits": masses.log().expand(rows, -1).contiguous(),
        "temperature": torch.ones(rows),
        "top_k": torch.tensor(top_k),
        "top_p": torch.tensor(top_p),
        "min_p": torch.zeros(rows),
        "seeds": torch.full((rows,), 5),
        "stream": 0,
        "filtered": True,
    }
    order = masses.argsort(descending=True, stable=True).tolist()
    run = sample.using(implementation)
    for position in (6, 11):  # draws of 0.995 and 0.023: the last and the first id that is kept
        arguments["positions"] = torch.full((rows,), position)
        tokens, finite = run(**arguments)
        assert finite.all() and torch.equal(tokens, sample.using("reference")(**arguments)[0])
        for token, count in zip(tokens.tolist(), kept, strict=True):
            assert token in order[:count]


@pytest.mark.parametrize("implementation", TESTED)
def test_flat_rows_keep_more_than_are_compared(implementation):
    """top-k then top-p, and top-p with min-p; each keeps hundreds, of two parts."""
    arguments = {
        "logits": torch.randn(2, 2100, generator=torch.Generator().manual_seed(4)) * 0.3,
        "temperature": torch.ones(2),
        "top_k": torch.tensor([600, 0]),
        "top_p": torch.tensor([0.7, 0.9]),
        "min_p": torch.tensor([0.0, 0.3]),
        "seeds": torch.arange(2),
        "positions": torch.full((2,), 3),
        "stream": 0,
        "filtered": True,
    }
    tokens, _ = sample.using(implementation)(**arguments)
    assert torch.equal(tokens, sample.using("reference")(**arguments)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(seeds=a["seeds"].int()),
        lambda a: a.update(top_k=a["top_k"][:-1]),
        lambda a: a.update(stream=-1),
        lambda a: a.update(filtered=1),
    ],
    ids=["bf16 logits", "i32 seeds", "a row less", "negative stream", "filtered is an integer"],
)
def test_refuses(change):
    check_refusal(sample, FILTERED, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a["temperature"].fill_(-1.0),
        lambda a: a["top_k"].fill_(-1),
        lambda a: a["top_p"].fill_(0.0),
        lambda a: a["min_p"].fill_(1.5),
        lambda a: a["positions"].fill_(-1),
        lambda a: a.update(filtered=False),
        lambda a: a.update(greedy=True),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "positions", "filtered", "greedy"],
)
def test_invalid_values(change):
    check_invalid(sample, FILTERED, change)


def test_control_top_p_before_top_k():
    def broken(top_p, top_k, **rest):
        probabilities = torch.softmax(rest["logits"].double(), -1)
        descending = probabilities.sort(-1, descending=True).values
        before = descending.cumsum(-1) - descending
        fewest = (before < top_p[:, None]).sum(-1)
        k = torch.where(top_k == 0, fewest, torch.minimum(fewest, top_k))
        return sample(top_p=torch.ones_like(top_p), top_k=k, **rest)

    check_control(sample, FILTERED, broken, steps=8)
