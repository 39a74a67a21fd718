import itertools
import random

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.draw import draw
from tercel.ops._lib.kda import HEAD, SMALL_HEAD
from tercel.ops.linear_attention.kda_commit import kda_commit
from tercel.ops.linear_attention.kda_decode import kda_decode
from tercel.ops.linear_attention.kda_verify import CONTRACT, kda_verify
from tercel.ops.linear_attention.kda_verify import reference as naive
from tests.interpreter import INTERPRETED, REASON

CELL, _, SMALL, DECODE = CONTRACT.cells
ONE = Cell("one head", R=2, width=2, H=1, D=2, SLOTS=4, lower_bound=-5.0, **SMALL_HEAD)
ROWS = ("qkv", "gate", "f", "b")
WEIGHTS = ("conv_weight", "A_log", "dt_bias", "o_norm", "lower_bound", "eps")
POOLS = ("conv", "recurrent", "draft_k", "draft_v", "draft_g", "draft_beta")
interpreted = pytest.mark.skipif(not INTERPRETED, reason=REASON)
TRITON = pytest.param("triton", marks=interpreted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(kda_verify, cell, kda_verify.portable.name, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence(dtype):
    check_sequence(kda_verify, SMALL, kda_verify.portable.name, steps=6, dtype=dtype)


def test_replay():
    check_replay(kda_verify, SMALL, kda_verify.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(width=7), "width"),
        (lambda a: a.update(width=0), "width"),
        (lambda a: a.update(conv=a["conv"][:, :3].contiguous()), "W-1+D"),
        (lambda a: a.update(qkv=a["qkv"][1:]), "R*width"),
        (lambda a: a.update(draft_g=a["draft_g"].bfloat16()), "draft_g"),
        (lambda a: a.update(pending=a["pending"][1:]), "axis R"),
    ],
    ids=["too wide", "no token", "window without drafts", "a row too few", "bf16 decay", "pending"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(kda_verify, SMALL, kda_verify.portable.name, change))


@pytest.mark.parametrize("cell", [SMALL, DECODE], ids=str)
def test_reads_nothing_on_the_host(cell):
    check_meta(kda_verify, cell, kda_verify.portable.name)


def test_width_one_is_decode():
    a = draw(kda_verify, DECODE, dtype=torch.float32)
    b = {name: a[name].clone() if name in POOLS else a[name] for name in a}
    out = kda_verify(**a)
    expected = kda_decode(**{name: b[name] for name in (*ROWS, *WEIGHTS, *POOLS[:2], "slots")})
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for name in POOLS[:2]:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("implementation", "seed", "heads", "drafts", "tokens"),
    [
        *itertools.product(["reference", "portable"], range(4), [2], [4], [24]),
        pytest.param("triton", 0, 1, 3, 11, marks=interpreted),
    ],
)
def test_any_acceptance_is_decode_token_by_token(implementation, seed, heads, drafts, tokens):
    """Steps of random width of which random prefixes are accepted, rejected drafts being noise,
    give the outputs and, after a commit, the state of decoding the accepted tokens."""
    sizes = {"R": 2, "width": 1, "H": heads, "D": drafts, "SLOTS": 4, "lower_bound": -5.0}
    cell = Cell("", **sizes, **SMALL_HEAD)
    a = draw(kda_verify, cell, dtype=torch.float32, seed=seed)
    weights = {name: a[name] for name in WEIGHTS}
    slots, pools = a["slots"], {name: a[name] for name in POOLS}
    noise = torch.Generator().manual_seed(seed)
    rows = {name: torch.randn(2, tokens, a[name].shape[1], generator=noise) for name in ROWS}
    expected, final = _decode(rows, weights, pools, slots)

    choose = random.Random(seed)
    verify = kda_verify.using(implementation)
    position, pending = [0, 0], torch.zeros(2, dtype=torch.int64)
    while max(position) < tokens - 1 - drafts:
        width = choose.randint(1, 1 + drafts)
        accepted = [choose.randint(0, width - 1) for _ in range(2)]
        step = {}
        for name, sequence in rows.items():
            drawn = torch.randn(2, width, sequence.shape[2], generator=noise)
            for row, (start, count) in enumerate(zip(position, accepted, strict=True)):
                drawn[row, : 1 + count] = sequence[row, start : start + 1 + count]
            step[name] = drawn.flatten(0, 1)
        out = verify(**step, **weights, **pools, slots=slots, pending=pending, width=width)
        for row, (start, count) in enumerate(zip(position, accepted, strict=True)):
            actual = out.view(2, width, -1)[row, : 1 + count]
            torch.testing.assert_close(
                actual, expected[row, start : start + 1 + count], rtol=1e-4, atol=2e-5
            )
            position[row] = start + 1 + count
        pending = torch.tensor(accepted)
    kda_commit.using(implementation)(**pools, slots=slots, pending=pending)
    for row, slot in enumerate(slots.tolist()):
        conv, recurrent = final[row][position[row]]
        torch.testing.assert_close(pools["conv"][slot, :3], conv)
        torch.testing.assert_close(pools["recurrent"][slot], recurrent, rtol=1e-4, atol=1e-5)


def _decode(rows, weights, pools, slots):
    """Outputs [2, tokens, H * V], and per row the (window, state) after each number of tokens."""
    conv, recurrent = pools["conv"].clone(), pools["recurrent"].clone()
    outputs, states = [], [{}, {}]
    for t in range(rows["qkv"].shape[1]):
        token = {name: sequence[:, t] for name, sequence in rows.items()}
        out = kda_decode(**token, **weights, conv=conv, recurrent=recurrent, slots=slots)
        outputs.append(out)
        for row, slot in enumerate(slots.tolist()):
            states[row][t + 1] = (conv[slot, :3].clone(), recurrent[slot].clone())
    return torch.stack(outputs, 1), states


@pytest.mark.parametrize("implementation", ["portable", TRITON])
def test_rejected_drafts_leave_no_trace(implementation):
    """Other rejected drafts, NaN among them, give the same bits ever after."""
    first = draw(kda_verify, ONE, dtype=torch.float32)
    first["pending"] = torch.tensor([1, 0])
    results = []
    for garbage in (0.0, float("nan")):
        a = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.items()}
        slots = a["slots"]
        for row, count in enumerate(a["pending"].tolist()):
            a["conv"][slots[row], 3 + count :] = garbage
            for name in POOLS[2:]:
                a[name][slots[row], count:] = garbage
        out = kda_verify.using(implementation)(**a)
        results.append((out, a["recurrent"][slots], a["conv"][slots, :3]))
    for zeros, nans in zip(*results, strict=True):
        assert torch.equal(zeros, nans)


@pytest.mark.parametrize("implementation", ["portable", TRITON])
def test_padding_rows_touch_no_live_slot(implementation):
    run = kda_verify.using(implementation)
    plain = draw(kda_verify, ONE, dtype=torch.float32)
    for name in POOLS:
        plain[name][0] = 0
    padded = {**plain, **{name: plain[name].clone() for name in POOLS}}
    for name in ROWS:
        padded[name] = torch.cat((plain[name], plain[name].flip(0)))
    zeros = torch.zeros_like(plain["slots"])
    padded["slots"] = torch.cat((plain["slots"], zeros))
    padded["pending"] = torch.cat((plain["pending"], zeros))
    out, expected = run(**padded), run(**plain)
    assert out.isfinite().all()
    torch.testing.assert_close(out[: expected.shape[0]], expected, rtol=1e-5, atol=1e-6)
    for name in POOLS:
        torch.testing.assert_close(padded[name][1:], plain[name][1:], equal_nan=True)


def _broken(**changes):
    def run(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for name, function in changes.items():
                patch.setattr(naive, name, function)
            return naive.kda_verify(*args, **kwargs)

    return run


def test_control_accepted_drafts_forgotten():
    check_control(kda_verify, SMALL, _broken(kda_commit=lambda *_: None))


def test_control_window_left_behind():
    def state_only(conv, *others):
        commit(conv.clone(), *others)

    commit = naive.kda_commit
    check_control(kda_verify, SMALL, _broken(kda_commit=state_only))


def test_control_drafts_committed():
    def all_tokens(**a):
        result = naive.kda_verify(**a)
        everything = torch.full_like(a["pending"], a["width"] - 1)
        kda_commit(**{name: a[name] for name in POOLS}, slots=a["slots"], pending=everything)
        return result

    check_control(kda_verify, SMALL, all_tokens)


@interpreted
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [SMALL, DECODE], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(kda_verify, cell, "triton", dtype=dtype)

    def test_published_head(self):
        cell = Cell("", R=1, width=3, H=1, D=2, SLOTS=2, lower_bound=-5.0, **HEAD)
        check_cell(kda_verify, cell, "triton", dtype=torch.bfloat16)

    def test_sequence(self):
        check_sequence(kda_verify, ONE, "triton", steps=3)

    def test_replay(self):
        check_replay(kda_verify, ONE, "triton")

    def test_scratch_is_written_before_it_is_read(self, monkeypatch):
        """What torch.empty returns holds NaN."""
        empty = torch.empty

        def poisoned(*shape, **options):
            return empty(*shape, **options).fill_(torch.nan)

        from tercel.ops.linear_attention.kda_verify import kernel_triton

        arguments = draw(kda_verify, ONE, dtype=torch.float32)
        monkeypatch.setattr(kernel_triton.torch, "empty", poisoned)
        assert kda_verify.using("triton")(**arguments).isfinite().all()

    def test_control_pending_of_the_next_row(self):
        def broken(*, pending, **others):
            return kda_verify.using("triton")(pending=pending.roll(1), **others)

        check_control(kda_verify, SMALL, broken)
