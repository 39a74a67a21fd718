import pytest
import torch

from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.core import mxfp8
from tercel.ops.moe.route.reference import route
from tercel.ops.moe.route_quantize import CONTRACT, route_quantize
from tests.interpreter import INTERPRETED, REASON

ONE, BATCH = CONTRACT.cells[:2]
REFERENCE = "reference"
OPTIONS = {"top_k": 4, "scaling": 1.0}
IMPLEMENTATIONS = [
    REFERENCE,
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=REASON)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cells(cell, dtype, implementation):
    check_cell(route_quantize, cell, implementation, dtype=dtype)


def test_meta():
    check_meta(route_quantize, ONE, REFERENCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_replay(implementation):
    check_replay(route_quantize, BATCH, implementation)


def case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, bias, z = (torch.randn(n, generator=generator) for n in ((3, 16), (16,), (3, 64)))
    return logits, bias, z


def test_routes_as_route_does():
    logits, bias, z = case()
    ids, weights, *_ = route_quantize(logits, bias, z, **OPTIONS)
    expected_ids, expected = route(logits, bias, **OPTIONS, renormalize=True)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_go_to_the_lower_id(implementation):
    run = route_quantize.using(implementation)
    ids, weights, *_ = run(torch.zeros(2, 16), torch.zeros(16), torch.ones(2, 32), **OPTIONS)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scales_round_up(implementation):
    """A block of 448 keeps its values; a little more doubles the scale instead of saturating."""
    z = torch.full((3, 32), 448.0)
    z[1, 0] = 449.0
    z[2] = 0.0
    run = route_quantize.using(implementation)
    *_, codes, scale = run(torch.zeros(3, 16), torch.zeros(16), z, **OPTIONS)
    assert scale.tolist() == [[127], [128], [0]]
    assert codes[0].float().eq(448).all() and codes[1].float().eq(224).all()
    assert codes[2].float().eq(0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_value_that_is_not_finite_spoils_its_block_alone(implementation):
    logits, bias, z = case()
    run = route_quantize.using(implementation)
    expected = run(logits, bias, z, **OPTIONS)
    z[1, 5] = float("inf")
    ids, _, codes, _ = run(logits, bias, z, **OPTIONS)
    assert codes[1, 5].float().isnan()
    assert torch.equal(ids, expected[0])
    assert torch.equal(codes[:, 32:].float(), expected[2][:, 32:].float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_takes_inputs_that_require_grad_detached(implementation):
    arguments = [t.requires_grad_() for t in case()]
    results = route_quantize.using(implementation)(*arguments, **OPTIONS)
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update({n: a[n].repeat(9, 1) for n in ("logits", "z")}),
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(logits=a["logits"].t().contiguous().t()),
        lambda a: a.update(bias=a["bias"][:-1].contiguous()),
        lambda a: a.update(z=a["z"][:, :-8].contiguous()),
        lambda a: a.update(top_k=17),
        lambda a: a.update(scaling=1),
    ],
    ids=["72 tokens", "bf16 logits", "strided", "a bias less", "part of a block", "top_k", "int"],
)
def test_refuses(change):
    check_refusal(route_quantize, BATCH, REFERENCE, change)


def test_control_weighs_with_the_bias():
    def broken(logits, bias, z, *, top_k, scaling):
        values, ids = (torch.sigmoid(logits) + bias).topk(top_k)
        return ids, values * scaling / values.sum(1, keepdim=True), *mxfp8.quantize(z)

    check_control(route_quantize, BATCH, broken)


def test_control_rounds_the_scale_down():
    def broken(logits, bias, z, *, top_k, scaling):
        ids, weights, _, scale = route_quantize(logits, bias, z, top_k=top_k, scaling=scaling)
        exponent = scale.int()[..., None] - 128
        blocks = torch.ldexp(z.unflatten(-1, (-1, 32)), -exponent).clamp(-448, 448)
        return ids, weights, blocks.flatten(-2).to(torch.float8_e4m3fn), scale - 1

    check_control(route_quantize, BATCH, broken)
