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
from tercel.ops.attention.qk_norm_rope import qk_norm_rope
from tercel.ops.spec.context_kv import CONTRACT, context_kv
from tercel.ops.spec.context_kv.reference import context_kv as naive
from tests.interpreter import INTERPRETED, REASON

NANO, PREFILL, DIVIDED, K3, PAIRS = CONTRACT.cells
PORTABLE = context_kv.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """Every entry that is not written stays poison."""
    check_cell(context_kv, cell, PORTABLE, dtype=dtype)


def test_sequence():
    check_sequence(context_kv, PAIRS, PORTABLE, steps=4)


@pytest.mark.parametrize("cell", [NANO, PAIRS], ids=str)
def test_replay(cell):
    check_replay(context_kv, cell, PORTABLE)


def test_runs_on_meta_tensors():
    drawn = draw(context_kv, NANO, dtype=torch.bfloat16)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in drawn.items()}
    assert context_kv(**meta) is None


def test_keys_are_those_of_a_block_at_the_same_positions():
    """Context and block share weights, norm and rotation; only what goes in differs."""
    a = draw(context_kv, NANO, dtype=torch.float32)
    context_kv(**a)
    queries = torch.zeros(8, 2 * 64)
    for layer in range(2):
        kv = a["x"] @ a["weight"].chunk(2)[layer].T
        _, k = qk_norm_rope(
            torch.cat((queries, kv), 1),
            torch.ones(64),
            a["k_norm"][layer],
            a["inv_freq"],
            a["positions"],
            heads=2,
            kv_heads=2,
            eps=1e-5,
            rope_scale=1.0,
            interleaved=False,
        )
        stored = a["pages"][layer].flatten(0, 1)[a["slot_mapping"]]
        torch.testing.assert_close(stored[:, 0], k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stored[:, 1].flatten(1), kv[:, 128:], rtol=1e-4, atol=1e-5)


def test_padded_tokens_reach_the_sink_only():
    a = draw(context_kv, NANO, dtype=torch.float32)
    a["slot_mapping"].zero_()
    context_kv(**a)
    assert a["pages"][:, 0, 0].isfinite().all()
    assert a["pages"].flatten(1, 2)[:, 1:].isnan().all()


def test_a_later_write_replaces_rejected_tokens():
    a = draw(context_kv, NANO, dtype=torch.float32)
    b = draw(context_kv, NANO, dtype=torch.float32, seed=1)
    alone = b["pages"].clone()
    context_kv(**{**a, "slot_mapping": b["slot_mapping"]})
    context_kv(**{**b, "pages": a["pages"]})
    context_kv(**{**b, "pages": alone})
    assert torch.equal(a["pages"].nan_to_num(7.0), alone.nan_to_num(7.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(pages=a["pages"][:1]),
        lambda a: a.update(slot_mapping=a["slot_mapping"].int()),
        lambda a: a.update(positions=a["positions"][:-1]),
        lambda a: a.update(k_norm=a["k_norm"].bfloat16()),
        lambda a: a.update(pages=a["pages"][..., :32]),
    ],
    ids=["a row of weights", "a layer", "i32", "positions", "bf16 norm", "half a head"],
)
def test_refuses(change):
    check_refusal(context_kv, NANO, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [lambda a: a["slot_mapping"].fill_(20), lambda a: a["slot_mapping"].add_(64)],
    ids=["one position for all", "outside the pool"],
)
def test_invalid_values(change):
    check_invalid(context_kv, NANO, change)


def wrong(**changes):
    def run(**a):
        naive(**{**a, **{name: change(a[name]) for name, change in changes.items()}})

    return run


CONTROLS = {
    "a position late": {"positions": lambda p: p + 1},
    "the next entry": {"slot_mapping": lambda s: (s + 1) % 64},
    "the other pairs": {"interleaved": lambda flag: not flag},
    "one layer's norm": {"k_norm": lambda w: w[:1].expand_as(w)},
    "eps": {"eps": lambda eps: 1e-2},
}


@pytest.mark.parametrize("changes", CONTROLS.values(), ids=CONTROLS)
def test_control(changes):
    check_control(context_kv, NANO, wrong(**changes))


def test_control_values_normed_as_keys():
    def broken(pages, slot_mapping, **rest):
        naive(pages=pages, slot_mapping=slot_mapping, **rest)
        rows = pages.flatten(1, 2)[:, slot_mapping]
        rows[:, :, 1] = torch.nn.functional.rms_norm(rows[:, :, 1], (64,))
        pages.flatten(1, 2)[:, slot_mapping] = rows

    check_control(context_kv, NANO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [PREFILL, DIVIDED, PAIRS], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(context_kv, cell, "triton", dtype=dtype)

    def test_sequence(self):
        check_sequence(context_kv, DIVIDED, "triton", steps=3)

    def test_replay(self):
        check_replay(context_kv, DIVIDED, "triton", dtype=torch.bfloat16)
