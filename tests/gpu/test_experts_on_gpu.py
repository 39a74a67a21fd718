"""The routed experts' kernels on a GPU: tensor-core branches, every width, routing cases."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_replay, packed
from tercel.contract.draw import draw
from tercel.ops.moe.experts_decode import experts_decode
from tercel.ops.moe.experts_decode_mxfp8 import experts_decode_mxfp8
from tercel.ops.moe.experts_grouped import experts_grouped
from tercel.ops.moe.experts_grouped_e4m3 import experts_grouped_e4m3
from tercel.ops.moe.experts_stream import experts_stream

pytestmark = pytest.mark.gpu

HERE = {"L": 3584, "mxfp4": True}
LOCAL = Cell("a range of the experts", T=8, k=16, E=6, I=768, total=20, first=4, **HERE)
DECODE = (
    LOCAL,
    Cell("narrow, all here", T=2, k=16, E=20, I=192, **HERE),
    Cell("half of the width", T=2, k=16, E=8, I=384, total=20, **HERE),
    Cell("whole experts", T=2, k=16, E=3, I=3072, total=20, **HERE),
    Cell("capacity: every slot here", T=8, k=16, E=16, I=192, **HERE),
    Cell("many tokens", T=64, k=16, E=8, I=768, total=20, **HERE),
    Cell("none here", T=2, k=16, E=2, I=768, total=99, first=99, **HERE),
    Cell("Kimi-Linear", T=2, k=8, E=9, L=2304, I=1024, activation="silu"),
)
GROUPED = (
    Cell("more slots than a block", T=300, k=4, E=3, I=768, total=8, first=2, **HERE),
    Cell("a range of the experts", T=70, k=4, E=6, I=768, total=20, first=4, **HERE),
    Cell("narrow", T=33, k=4, E=6, I=192, **HERE),
    Cell("Kimi-Linear", T=100, k=4, E=9, L=2304, I=1024, activation="silu"),
)
OPS = (
    *((experts_decode, cell) for cell in DECODE),
    *((experts_grouped, cell) for cell in GROUPED),
    *((experts_decode_mxfp8, cell) for cell in DECODE if cell.get("mxfp4")),
    *((experts_grouped_e4m3, cell) for cell in GROUPED[:-1]),
    (experts_stream, Cell("two narrow tokens", T=2, k=16, E=20, I=192, **HERE)),
    (experts_stream, Cell("the same experts", T=2, k=16, E=16, I=192, **HERE)),
    (experts_stream, Cell("one wide token", T=1, k=16, E=6, I=768, total=20, **HERE)),
)


def named(item):
    """An op by its name, a cell by its reason."""
    return getattr(item, "why", None) or item.name


def kernels(op):
    return [name for name in op.implementations if name in ("gluon", "triton")]


def kernel(op, cell, seed=0, name="triton"):
    """The kernel and packed arguments of a cell."""
    chosen = op.implementation(name)
    arguments = draw(op, cell, dtype=torch.bfloat16, device="cuda", seed=seed)
    return chosen.run, packed(op, chosen, arguments, torch.bfloat16)


@pytest.mark.parametrize(("op", "cell"), OPS, ids=named)
def test_cells_replay_and_repeat(op, cell):
    for name in kernels(op):
        check_cell(op, cell, name, dtype=torch.bfloat16, device="cuda")
        check_replay(op, cell, name, dtype=torch.bfloat16, device="cuda")
        run, arguments = kernel(op, cell, name=name)
        expected = run(**arguments)
        assert all(torch.equal(run(**arguments), expected) for _ in range(20))


@pytest.mark.parametrize("cell", GROUPED, ids=lambda cell: cell.why)
def test_both_grouped_kernels_give_the_same_bits(cell):
    (first, arguments), (second, _) = (
        kernel(experts_grouped, cell, name=n) for n in ("gluon", "triton")
    )
    assert torch.equal(first(**arguments), second(**arguments))


@pytest.mark.parametrize(("op", "cell"), [(experts_decode, LOCAL), (experts_grouped, GROUPED[0])])
def test_rows_do_not_depend_on_their_neighbours(op, cell):
    run, arguments = kernel(op, cell)
    together = run(**arguments)
    for row in range(0, cell["T"], 7):
        alone = {name: arguments[name][row : row + 1].clone() for name in ("z", "ids", "weights")}
        others = {name: arguments[name].flip(0) for name in alone}
        if op is experts_decode:  # a grouped call of one row is cut otherwise
            assert torch.equal(run(**{**arguments, **alone})[0], together[row])
        assert torch.equal(run(**{**arguments, **others}).flip(0)[row], together[row])


@pytest.mark.parametrize("op", [experts_decode, experts_decode_mxfp8], ids=named)
@pytest.mark.parametrize("cell", DECODE[:2], ids=named)
def test_early_ids_change_no_bit(op, cell):
    """At two tokens and at eight, which are cut otherwise."""
    run, arguments = kernel(op, cell)
    assert torch.equal(run(**{**arguments, "ids_early": True}), run(**arguments))


def test_a_code_that_is_not_a_number_spoils_its_row_alone():
    run, arguments = kernel(experts_decode_mxfp8, LOCAL)
    arguments["ids"][:, 0] = LOCAL["first"]  # every row has a slot here
    arguments["ids"][:, 1:] = torch.arange(5, 20, device="cuda")
    expected = run(**arguments)
    arguments["codes"].view(torch.uint8)[3, 40] = 0x7F
    actual = run(**arguments)
    assert actual[3].isnan().all()
    others = [row for row in range(LOCAL["T"]) if row != 3]
    assert torch.equal(actual[others], expected[others])


def test_skewed_routings():
    """256 routings in which few experts take most of the slots, against plain torch."""
    run, arguments = kernel(experts_decode, LOCAL)
    plain = experts_decode.portable
    drawn = draw(experts_decode, LOCAL, dtype=torch.bfloat16, device="cuda")
    expected = packed(experts_decode, plain, drawn, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(0, 6, 20).exp()
    for _ in range(256):
        ids = torch.multinomial(skew.expand(8, -1), 16, generator=generator).cuda()
        ours, theirs = (each({**a, "ids": ids}) for each, a in (
            (lambda a: run(**a), arguments), (lambda a: plain.run(**a), expected),
        ))  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def test_what_was_in_memory_does_not_matter():
    """Scratch memory comes uninitialized: whatever it held, results are the same."""
    run, arguments = kernel(experts_decode, LOCAL)
    expected = run(**arguments)
    for value in (float("nan"), 1e30):
        size = LOCAL["T"] * LOCAL["k"] * LOCAL["I"]  # of the activations between the launches
        held = [torch.full((size,), value, dtype=torch.bfloat16, device="cuda") for _ in range(64)]
        del held
        assert torch.equal(run(**arguments), expected)


def test_packing_on_the_device_is_packing_on_the_host():
    drawn = draw(experts_decode, LOCAL, dtype=torch.bfloat16)
    chosen = experts_decode.implementation("triton")
    names = experts_decode.contract.weights
    host = chosen.pack(*(drawn[n] for n in names), dtype=torch.bfloat16)
    there = [None if drawn[n] is None else drawn[n].cuda() for n in names]
    for ours, theirs in zip(chosen.pack(*there, dtype=torch.bfloat16), host, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours.cpu(), theirs)
