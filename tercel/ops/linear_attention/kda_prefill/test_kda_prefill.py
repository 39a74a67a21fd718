import pytest
import torch

from tercel.contract import Cell, Implementation, Op
from tercel.contract.check import (
    check_cell,
    check_control,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.compare import measure
from tercel.contract.draw import Maker, draw
from tercel.errors import CheckFailed, ContractError
from tercel.ops.linear_attention.kda_prefill import CONTRACT, kda_prefill
from tercel.ops.linear_attention.kda_prefill import reference as naive
from tests.interpreter import INTERPRETED, REASON
from tests.poison import poison_new_empty

CELL = CONTRACT.cells[0]
SMALL = Cell("small", H=2, K=16, V=16, SLOTS=3, g_min=-3.0, cu_seqlens=(0, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(kda_prefill, cell, kda_prefill.portable.name, dtype=dtype)


def test_fp64_agrees_to_its_own_rounding():
    cell = CONTRACT.cells[2]
    ours, theirs = draw(kda_prefill, cell, dtype=torch.float64), None
    ours["g"], ours["state"] = ours["g"].double(), ours["state"].double()
    theirs = {**ours, "state": ours["state"].clone()}
    actual, expected = kda_prefill(**ours), kda_prefill.using("reference")(**theirs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours["state"], theirs["state"], equal_nan=True)


def test_sequence():
    check_sequence(kda_prefill, CONTRACT.cells[2], kda_prefill.portable.name, steps=4)


def test_replay():
    check_replay(kda_prefill, CELL, kda_prefill.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(state=a["state"].bfloat16()), "state"),
        (lambda a: a.update(g=a["g"][:, :, :64].contiguous()), "axis K"),
        (lambda a: a.update(qkv=a["qkv"][:, :-1]), "H*(2*K+V)"),
        (lambda a: a.update(cu_seqlens=a["cu_seqlens"][1:]), "cu_seqlens"),
        (lambda a: a.update(fresh=()), "fresh"),
    ],
    ids=["bf16 state", "half the channels", "short rows", "bounds", "fresh"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(kda_prefill, CELL, kda_prefill.portable.name, change))


DECAYS = {
    "at the bound": (-5.0, -4.99),
    "none": (0.0, 0.0),
    "everything between": (-5.0, 0.0),
    "far below any bound": (-80.0, 0.0),
    "alternating": None,
}


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
def test_long_sequences_at_extreme_decays(decay):
    """400 tokens in fp32 stay within 1e-6 of the fp64 recurrence."""
    make = Maker(5, torch.float32)
    tokens, heads, width = 400, 2, 64
    low, high = decay or (0.0, 0.0)
    g = make.uniform(tokens, heads, width, low=low, high=high, dtype="f32")
    if decay is None:
        g[: tokens // 2 : 2, :, ::2] = -5.0
    qkv, b = make.normal(tokens, 3 * heads * width), make.normal(tokens, heads, scale=3.0)
    state = make.normal(1, heads, width, width, dtype="f32")
    _compare_to_recurrence(qkv, g, b, state)


def test_repeated_keys_without_decay():
    """The triangular system at its worst: all keys equal but for the sign, beta near one."""
    make = Maker(6, torch.float32)
    tokens, width = 256, 64
    qkv, b = make.normal(tokens, 3 * width), make.uniform(tokens, 1, low=3.0, high=8.0)
    sign = make.integers(tokens, 1, low=0, high=2, dtype="f32") * 2 - 1
    qkv[:, width : 2 * width] = sign * qkv[:1, width : 2 * width]
    g = make.uniform(tokens, 1, width, low=-1e-3, high=0.0, dtype="f32")
    _compare_to_recurrence(qkv, g, b, make.normal(1, 1, width, width, dtype="f32"))


def _compare_to_recurrence(qkv, g, b, state):
    call = {"slots": torch.tensor([0]), "cu_seqlens": (0, qkv.shape[0]), "fresh": (False,)}
    exact_state = state.double()
    exact = naive.kda_prefill(qkv.double(), g.double(), b.double(), exact_state, **call)
    o = kda_prefill(qkv, g, b, state, **call)
    limit = 2e-6 * 2**24  # token by token in fp32 the same sums are 1.1e-6 to 2.6e-6 off
    assert measure(o.flatten(), exact.flatten()).element_ulps < limit
    assert measure(state.flatten(), exact_state.flatten()).element_ulps < limit


@pytest.mark.parametrize("split", range(1, 30))
def test_a_split_anywhere_changes_nothing(split):
    whole = draw(kda_prefill, SMALL, dtype=torch.float32)
    parts = {**whole, "state": whole["state"].clone()}
    expected = kda_prefill(**whole)
    for start, stop in ((0, split), (split, 30)):
        tokens = {name: whole[name][start:stop] for name in ("qkv", "g", "b")}
        o = kda_prefill(**{**parts, **tokens, "cu_seqlens": (0, stop - start)})
        torch.testing.assert_close(o, expected[start:stop], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts["state"], whole["state"], equal_nan=True)


def _broken(**changes):
    """The reference with functions of its module replaced."""

    def run(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for name, function in changes.items():
                patch.setattr(naive, name, function)
            return naive.kda_prefill(*args, **kwargs)

    return run


def _decay_after_the_update(state, k, v, g, beta):
    error = beta.unsqueeze(-1) * (v - naive.read(state, k))
    state += error.unsqueeze(-1) * k.unsqueeze(-2)
    state *= g.exp().unsqueeze(-2)


def _state_transposed(state, k, v, g, beta):
    state *= g.exp().unsqueeze(-1)
    error = beta.unsqueeze(-1) * (v - (state * k.unsqueeze(-1)).sum(-2))
    state += k.unsqueeze(-1) * error.unsqueeze(-2)


def _rms_eps(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6 * x.shape[-1])


def test_control_decay_after_the_update():
    check_control(kda_prefill, SMALL, _broken(update=_decay_after_the_update))


def test_control_state_transposed():
    check_control(kda_prefill, SMALL, _broken(update=_state_transposed))


def test_control_rms_eps_in_the_l2_norm():
    check_control(kda_prefill, SMALL, _broken(l2_normalize=_rms_eps))


def test_control_wrong_slot():
    def broken(qkv, g, b, state, slots, **lengths):
        return naive.kda_prefill(qkv, g, b, state, slots.flip(0), **lengths)

    check_control(kda_prefill, CONTRACT.cells[2], broken)


CHUNKED = Cell("chunks", H=1, K=16, V=32, SLOTS=4, g_min=-0.3, cu_seqlens=(0, 3, 38, 39))


def _chunked(arguments, **config):
    from tercel.ops.linear_attention.kda_prefill import kernel_triton as kernel

    names = ("qkv", "g", "b", "state", "slots", "cu_seqlens", "fresh")
    return kernel.launch(*(arguments[n] for n in names), kernel.WIDE._replace(**config))


def _check(cell, run, **options):
    held = (kda_prefill.implementation("reference"), Implementation("probe", run))
    probe = Op(kda_prefill.__wrapped__, CONTRACT, held)
    return check_cell(probe, cell, "probe", **{"dtype": torch.bfloat16, **options})


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """The kernels, interpreted, at small heads."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_cell(self, dtype):
        check_cell(kda_prefill, CONTRACT.cells[2], "triton", dtype=dtype)

    def test_memory_that_was_not_written_is_not_read(self, monkeypatch):
        poison_new_empty(monkeypatch)
        check_cell(kda_prefill, CHUNKED, "triton", dtype=torch.bfloat16)

    def test_segments(self, monkeypatch):
        poison_new_empty(monkeypatch)

        def run(**arguments):
            return _chunked(arguments, chunk=16, segment_chunks=4)

        cell = Cell("segments", H=1, K=16, V=16, SLOTS=3, g_min=-0.1, cu_seqlens=(0, 2, 140))
        _check(cell, run)

    def test_channels_in_parts(self):
        cell = Cell("parts", H=1, K=32, V=32, SLOTS=2, g_min=-2.0, cu_seqlens=(0, 20))
        _check(cell, lambda **arguments: _chunked(arguments, depth=16))

    def test_extreme_decays(self):
        cell = Cell("extreme", H=1, K=16, V=16, SLOTS=2, g_min=-200.0, cu_seqlens=(0, 33))
        check_cell(kda_prefill, cell, "triton", dtype=torch.bfloat16)

    def test_sequences_do_not_depend_on_their_neighbours(self):
        together = draw(kda_prefill, CHUNKED, dtype=torch.bfloat16)
        alone = {**together, "state": together["state"].clone()}

        def run(**arguments):
            return _chunked(arguments, chunk=16)

        o = run(**together)
        rows = slice(3, 38)
        alone.update({name: together[name][rows] for name in ("qkv", "g", "b")})
        alone.update(slots=together["slots"][1:2], cu_seqlens=(0, 35), fresh=together["fresh"][1:2])
        assert torch.equal(run(**alone), o[rows])
        slot = int(together["slots"][1])
        assert torch.equal(alone["state"][slot], together["state"][slot])

    def test_fresh_sequence_without_tokens(self):
        cell = Cell("none", H=1, K=16, V=16, SLOTS=4, g_min=-1.0, cu_seqlens=(0, 1, 1))
        check_cell(kda_prefill, cell, "triton", dtype=torch.bfloat16)

    def test_refuses_heads_that_are_no_power_of_two(self):
        cell = Cell("odd", H=1, K=24, V=32, SLOTS=2, g_min=-1.0, cu_seqlens=(0, 4))
        with pytest.raises(ContractError, match="24"):
            kda_prefill.using("triton")(**draw(kda_prefill, cell, dtype=torch.bfloat16))

    def test_control_decays_that_stop_too_early(self, monkeypatch):
        from tercel.ops._lib import kernel_kda_chunk as kernels

        monkeypatch.setattr(kernels, "LEAST_DECAY", -1.0)
        with pytest.raises(CheckFailed, match=r"kda_prefill.* (o|state)"):
            check_cell(kda_prefill, CONTRACT.cells[2], "triton", dtype=torch.bfloat16)

    def test_control_blocks_that_do_not_meet(self, monkeypatch):
        from tercel.ops._lib import kernel_kda_chunk as kernels

        meet = kernels._meet
        monkeypatch.setattr(kernels, "_meet", lambda i, j, BLOCK: meet(i, j, BLOCK) & (BLOCK != 8))
        with pytest.raises(CheckFailed, match=r"kda_prefill.* o"):
            check_cell(kda_prefill, CHUNKED, "triton", dtype=torch.bfloat16)
