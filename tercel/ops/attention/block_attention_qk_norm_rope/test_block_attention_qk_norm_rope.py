import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
)
from tercel.contract.draw import draw
from tercel.ops.attention.block_attention import block_attention
from tercel.ops.attention.block_attention_qk_norm_rope import (
    CONTRACT,
    block_attention_qk_norm_rope,
)
from tercel.ops.attention.block_attention_qk_norm_rope import portable as fast
from tercel.ops.attention.qk_norm_rope import qk_norm_rope
from tests.interpreter import INTERPRETED, REASON

OP = block_attention_qk_norm_rope
NANO, DIVIDED, _, SPECULATORS, _ = FEW = CONTRACT.cells[:5]
SPLITS = CONTRACT.cells[5:]
PORTABLE = OP.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", FEW, ids=str)
def test_cells(cell, dtype):
    check_cell(OP, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", SPLITS[::5], ids=str)
def test_splits(cell):
    """A GPU certifies all of them."""
    check_cell(OP, cell, PORTABLE)


def in_sequence(a, implementation):
    """The two ops, one after the other."""
    slots = torch.arange(a["width"])
    names = ("heads", "kv_heads", "eps", "rope_scale", "interleaved")
    q, k = qk_norm_rope.using(implementation)(
        *(a[name] for name in ("qkv", "q_norm", "k_norm", "inv_freq")),
        (a["context_lens"][:, None] + slots).flatten(),
        **{name: a[name] for name in names},
    )
    v = a["qkv"].unflatten(1, (a["heads"] + 2 * a["kv_heads"], -1))[:, a["heads"] + a["kv_heads"] :]
    names = ("width", "scale", "window", "window_from_anchor", "causal")
    return block_attention.using(implementation)(
        q,
        k,
        v,
        *(a[name] for name in ("k_cache", "v_cache", "block_table", "context_lens")),
        v_dim=k.shape[2],
        **{name: a[name] for name in names},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", OP.implementations)
@pytest.mark.parametrize("cell", [NANO, SPECULATORS], ids=str)
def test_equals_the_two_in_sequence(cell, implementation, dtype):
    a = draw(OP, cell, dtype=dtype)
    assert torch.equal(OP.using(implementation)(**a), in_sequence(a, implementation))


@pytest.mark.parametrize("cell", [NANO, SPECULATORS], ids=str)
def test_replay(cell):
    check_replay(OP, cell, PORTABLE)


def test_meta():
    check_meta(OP, NANO, PORTABLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(qkv=a["qkv"][:, :-64]),
        lambda a: a.update(inv_freq=a["inv_freq"][:-1]),
        lambda a: a.update(v_cache=a["v_cache"][:-1]),
        lambda a: a.update(width=6),
        lambda a: a.update(context_lens=a["context_lens"].int()),
    ],
    ids=["a head less", "frequencies", "caches differ", "width", "i32"],
)
def test_refuses(change):
    check_refusal(OP, NANO, PORTABLE, change)


def test_invalid_values():
    check_invalid(OP, NANO, lambda a: a["context_lens"].fill_(49))


CONTROLS = {
    "the other pairs": (NANO, {"interleaved": True}),
    "YaRN's scale left out": (SPECULATORS, {"rope_scale": 1.0}),
    "causal": (NANO, {"causal": True}),
}


@pytest.mark.parametrize(("cell", "changes"), CONTROLS.values(), ids=CONTROLS)
def test_control(cell, changes):
    check_control(OP, cell, lambda **a: fast.block_attention_qk_norm_rope(**{**a, **changes}))


def test_control_other_frequencies():
    def broken(inv_freq, **rest):
        return fast.block_attention_qk_norm_rope(inv_freq=inv_freq * 1.01, **rest)

    check_control(OP, NANO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize(
        ("cell", "dtype"),
        [(NANO, torch.float32), (DIVIDED, torch.bfloat16), (SPECULATORS, torch.bfloat16)],
        ids=str,
    )
    def test_cells(self, cell, dtype):
        check_cell(OP, cell, "triton", dtype=dtype)

    def test_replay(self):
        check_replay(OP, SPECULATORS, "triton", dtype=torch.bfloat16)
