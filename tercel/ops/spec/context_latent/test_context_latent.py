import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.draw import draw
from tercel.ops.attention.mla_query_rope import mla_query_rope
from tercel.ops.spec.context_latent import CONTRACT, context_latent
from tercel.ops.spec.context_latent.reference import context_latent as naive
from tests.interpreter import INTERPRETED, REASON

NANO, _, HALVES = CONTRACT.cells
PORTABLE = context_latent.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """Every entry that is not written stays poison."""
    check_cell(context_latent, cell, PORTABLE, dtype=dtype)


def test_sequence():
    check_sequence(context_latent, HALVES, PORTABLE, steps=4)


def test_replay():
    check_replay(context_latent, NANO, PORTABLE)


def test_runs_on_meta_tensors():
    drawn = draw(context_latent, NANO, dtype=torch.bfloat16)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in drawn.items()}
    assert context_latent(**meta) is None


def test_entries_are_those_of_a_block_at_the_same_positions():
    a = draw(context_latent, NANO, dtype=torch.float64)
    context_latent(**a)
    for layer, weight in enumerate(a["weight"].chunk(2)):
        _, entry = mla_query_rope(
            torch.ones(8, 4, dtype=torch.float64),
            torch.ones(4, dtype=torch.float64),
            torch.zeros(24, 4, dtype=torch.float64),
            a["x"] @ weight.T,
            a["kv_norm"][layer],
            torch.zeros(1, 8, 96, dtype=torch.float64),
            a["inv_freq"],
            a["positions"],
            eps=1e-5,
            rope_scale=1.0,
            interleaved=True,
        )
        stored = a["pages"][layer].flatten(0, 1)[a["slot_mapping"]]
        torch.testing.assert_close(stored, entry)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(pages=a["pages"][:1]),
        lambda a: a.update(kv_norm=a["kv_norm"].bfloat16()),
        lambda a: a.update(slot_mapping=a["slot_mapping"].int()),
    ],
    ids=["a row of weights", "a layer", "bf16 norm", "i32"],
)
def test_refuses(change):
    check_refusal(context_latent, NANO, PORTABLE, change)


def test_invalid_values():
    check_invalid(context_latent, NANO, lambda a: a["slot_mapping"].add_(64))


def wrong(**changes):
    def run(**a):
        naive(**{**a, **{name: change(a[name]) for name, change in changes.items()}})

    return run


CONTROLS = {
    "a position late": {"positions": lambda p: p + 1},
    "the next entry": {"slot_mapping": lambda s: (s + 1) % 64},
    "the other pairs": {"interleaved": lambda flag: not flag},
    "one layer's norm": {"kv_norm": lambda w: w[:1].expand_as(w)},
    "eps": {"eps": lambda eps: 1e-2},
}


@pytest.mark.parametrize("changes", CONTROLS.values(), ids=CONTROLS)
def test_control(changes):
    check_control(context_latent, NANO, wrong(**changes))


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize(
        ("cell", "dtype"), [(NANO, torch.bfloat16), (HALVES, torch.float32)], ids=str
    )
    def test_cells(self, cell, dtype):
        check_cell(context_latent, cell, "triton", dtype=dtype)

    def test_sequence(self):
        check_sequence(context_latent, HALVES, "triton", steps=3)

    def test_refuses_channels_that_are_no_power_of_two(self):
        sizes = {"L": 8, "E": 20}
        problem = context_latent.implementation("triton").admits(sizes)
        assert "E - L=12" in problem
