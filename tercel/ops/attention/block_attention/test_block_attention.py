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
from tercel.ops._lib import block_attention as lib
from tercel.ops.attention.block_attention import CONTRACT, block_attention
from tercel.ops.attention.block_attention import portable as fast
from tests.interpreter import INTERPRETED, REASON

NANO, K3, WIDE, ANCHORED, SLIDING, MLA = CONTRACT.cells
PORTABLE = block_attention.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """All that is not context is poison."""
    check_cell(block_attention, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", [NANO, ANCHORED, MLA], ids=str)
def test_replay(cell):
    check_replay(block_attention, cell, PORTABLE)


@pytest.mark.parametrize("cell", [NANO, SLIDING, MLA], ids=str)
def test_meta(cell):
    check_meta(block_attention, cell, PORTABLE)


@pytest.mark.parametrize("cell", [NANO, WIDE, SLIDING], ids=str)
def test_requests_do_not_depend_on_their_batch(cell, monkeypatch):
    a = draw(block_attention, cell, dtype=torch.float32)
    whole = block_attention(**a)
    width = a["width"]
    for request in range(len(a["context_lens"])):
        tokens, row = slice(request * width, (request + 1) * width), slice(request, request + 1)
        alone = {name: a[name][tokens] for name in ("q", "k", "v")}
        alone |= {name: a[name][row] for name in ("block_table", "context_lens")}
        torch.testing.assert_close(block_attention(**{**a, **alone}), whole[tokens])
    monkeypatch.setattr(lib, "WORKSPACE", 1)
    torch.testing.assert_close(block_attention(**a), whole)


def test_a_padding_request_sees_its_block_only():
    a = draw(block_attention, NANO, dtype=torch.float32)
    a["block_table"].zero_()
    a["context_lens"].zero_()
    out = block_attention(**a).view(5, 7, 4, 64)
    q, k, v = (a[x].view(5, 7, -1, 64).transpose(1, 2) for x in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_rejected_rows_behind_the_context_do_not_matter():
    """What an earlier round left there is overwritten later; until then nobody sees it."""
    a = draw(block_attention, K3, dtype=torch.float32)
    expected = block_attention(**a)
    table, cut = a["block_table"][0], 187
    for position in range(cut, cut + 5):
        page, offset = int(table[position // 64]), position % 64
        a["k_cache"][page, offset] = 3.0
        a["v_cache"][page, offset] = 3.0
    assert torch.equal(block_attention(**a), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(k=a["k"][:-1]),
        lambda a: a.update(v=None),
        lambda a: a.update(k=a["k"][:, :1], v=a["v"][:, :1]),
        lambda a: a.update(block_table=a["block_table"].int()),
        lambda a: a.update(width=6),
        lambda a: a.update(window=0),
        lambda a: a.update(k_cache=a["k_cache"].bfloat16()),
    ],
    ids=["a slot less", "no v", "KV heads", "i32", "width", "window", "bf16 cache"],
)
def test_refuses(change):
    check_refusal(block_attention, NANO, PORTABLE, change)


@pytest.mark.parametrize(
    "change",
    [lambda a: a["context_lens"].fill_(49), lambda a: a["block_table"].fill_(12)],
    ids=["context", "page"],
)
def test_invalid_values(change):
    check_invalid(block_attention, NANO, change)


def with_changes(**changes):
    return lambda **a: fast.block_attention(**{**a, **changes})


CONTROLS = {
    "causal": (NANO, {"causal": True}),
    "not causal": (ANCHORED, {"causal": False}),
    "no window": (SLIDING, {"window": None}),
    "window one less": (ANCHORED, {"window": 6}),
    "window of the other kind": (ANCHORED, {"window_from_anchor": False}),
    "the other kind": (SLIDING, {"window_from_anchor": True}),
}


@pytest.mark.parametrize(("cell", "changes"), CONTROLS.values(), ids=CONTROLS)
def test_control(cell, changes):
    check_control(block_attention, cell, with_changes(**changes))


def test_control_one_context_token_less():
    def broken(context_lens, **rest):
        return fast.block_attention(context_lens=(context_lens - 1).clamp_min(0), **rest)

    check_control(block_attention, K3, broken)


def test_control_query_heads_dealt_to_kv_heads():
    def broken(q, **rest):
        dealt = q[:, [0, 2, 1, 3]]
        out = fast.block_attention(q=dealt, **rest).unflatten(1, (4, -1))
        return out[:, [0, 2, 1, 3]].flatten(1)

    check_control(block_attention, NANO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize(
        ("cell", "dtype"),
        [
            (NANO, torch.float32),
            (K3, torch.bfloat16),
            (ANCHORED, torch.bfloat16),
            (SLIDING, torch.float32),
            (MLA, torch.bfloat16),
        ],
        ids=str,
    )
    def test_cells(self, cell, dtype):
        check_cell(block_attention, cell, "triton", dtype=dtype)

    def test_replay(self):
        check_replay(block_attention, ANCHORED, "triton", dtype=torch.bfloat16)

    @pytest.mark.parametrize("window", [60, 100, 200])
    @pytest.mark.parametrize("anchored", [False, True])
    def test_a_window_starts_in_any_tile(self, window, anchored):
        a = draw(block_attention, K3, dtype=torch.float32)
        a |= {"window": window, "window_from_anchor": anchored}
        ours, plain = (block_attention.using(name)(**a) for name in ("triton", PORTABLE))
        torch.testing.assert_close(ours, plain)

    def test_control_a_part_is_lost(self):
        """The context of 187 tokens is divided; without its second part the cell fails."""

        def broken(context_lens, **rest):
            return block_attention.using("triton")(context_lens=context_lens - 60, **rest)

        check_control(block_attention, K3, broken)
