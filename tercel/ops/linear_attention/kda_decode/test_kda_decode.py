import pytest
import torch

from tercel.contract import Cell, Implementation, Op
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.contract.draw import draw
from tercel.errors import ContractError
from tercel.ops._lib.kda import HEAD, SMALL_HEAD, Tiles
from tercel.ops.linear_attention.causal_conv1d import causal_conv1d
from tercel.ops.linear_attention.kda_decode import CONTRACT, kda_decode
from tercel.ops.linear_attention.kda_decode import reference as naive
from tercel.ops.linear_attention.kda_gate import kda_gate
from tercel.ops.linear_attention.kda_prefill import kda_prefill
from tests.interpreter import INTERPRETED, REASON

CELL, _, SMALL = CONTRACT.cells
ONE = Cell("one head", R=2, H=1, S=3, SLOTS=4, lower_bound=-5.0, **SMALL_HEAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(kda_decode, cell, kda_decode.portable.name, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence(dtype):
    check_sequence(kda_decode, SMALL, kda_decode.portable.name, steps=12, dtype=dtype)


def test_replay():
    check_replay(kda_decode, CELL, kda_decode.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(recurrent=a["recurrent"].bfloat16()), "recurrent"),
        (lambda a: a.update(conv=a["conv"][:, :2].contiguous()), "S >= W - 1"),
        (lambda a: a.update(gate=a["gate"][:, 1:]), "gate"),
        (lambda a: a.update(slots=a["slots"][:-1]), "axis R"),
        (lambda a: a.update(o_norm=a["o_norm"].bfloat16()), "o_norm"),
        (lambda a: a.update(lower_bound=0.0), "lower_bound"),
    ],
    ids=["bf16 state", "short window", "gate", "a slot too few", "bf16 norm", "bound of zero"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(kda_decode, CELL, kda_decode.portable.name, change))


def test_reads_nothing_on_the_host():
    check_meta(kda_decode, SMALL, kda_decode.portable.name)


IMPLEMENTATIONS = [
    "portable",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=REASON)),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_touch_no_live_slot(implementation):
    run = kda_decode.using(implementation)
    plain = draw(kda_decode, ONE, dtype=torch.float32)
    for name in ("conv", "recurrent"):
        plain[name][0] = 0
    padded = {**plain, "conv": plain["conv"].clone(), "recurrent": plain["recurrent"].clone()}
    for name in ("qkv", "gate", "f", "b"):
        padded[name] = torch.cat((plain[name], plain[name].flip(0)))
    padded["slots"] = torch.cat((plain["slots"], torch.zeros_like(plain["slots"])))
    expected = run(**plain)
    for _ in range(2):
        out = run(**padded)
        assert out.isfinite().all()
        torch.testing.assert_close(out[:2], expected, rtol=1e-5, atol=1e-6)
        for name in ("conv", "recurrent"):
            torch.testing.assert_close(padded[name][1:], plain[name][1:], equal_nan=True)
        expected = run(**plain)


@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_prefill_then_decode_is_prefill_of_everything(prompt):
    a = draw(kda_decode, SMALL, dtype=torch.float32)
    tokens = 20
    make_rows = torch.Generator().manual_seed(0)
    rows = {
        name: torch.randn(tokens, a[name].shape[1], generator=make_rows)
        for name in ("qkv", "gate", "f", "b")
    }
    slot = a["slots"][:1]

    def prefill(count):
        conv, recurrent = a["conv"].clone(), a["recurrent"].clone()
        lengths = {"cu_seqlens": (0, count), "fresh": (True,)}
        y = causal_conv1d(rows["qkv"][:count], a["conv_weight"], conv, slot, **lengths)
        g = kda_gate(rows["f"][:count], a["A_log"], a["dt_bias"], lower_bound=a["lower_bound"])
        o = kda_prefill(y, g, rows["b"][:count], recurrent, slot, **lengths)
        out = naive.gated_norm(o, rows["gate"][:count], a["o_norm"], a["eps"])
        return out, {"conv": conv, "recurrent": recurrent}

    expected, state = prefill(tokens)
    _, running = prefill(prompt)
    for t in range(prompt, tokens):
        row = {name: value[t : t + 1] for name, value in rows.items()}
        out = kda_decode(**{**a, **row, **running, "slots": slot})
        torch.testing.assert_close(out, expected[t : t + 1], rtol=1e-4, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(running[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)


def _broken(**changes):
    def run(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for name, function in changes.items():
                patch.setattr(naive, name, function)
            return naive.kda_decode(*args, **kwargs)

    return run


def test_control_taps_reversed():
    def reversed_taps(x, weight, *args, **kwargs):
        return conv(x, weight.flip(1), *args, **kwargs)

    conv = naive.causal_conv1d
    check_control(kda_decode, SMALL, _broken(causal_conv1d=reversed_taps))


def test_control_window_that_does_not_move():
    def still(x, weight, state, *args, **kwargs):
        return conv(x, weight, state.clone(), *args, **kwargs)

    conv = naive.causal_conv1d
    check_control(kda_decode, SMALL, _broken(causal_conv1d=still))


def test_control_state_transposed():
    def transposed(qkv, g, b, state, *args, **kwargs):
        flipped = state.mT.contiguous()
        o = recur(qkv, g, b, flipped, *args, **kwargs)
        state.copy_(flipped.mT)
        return o

    recur = naive.kda_prefill
    check_control(kda_decode, CELL, _broken(kda_prefill=transposed))


def test_control_norm_over_all_heads():
    def wide(o, gate, o_norm, eps):
        scale = torch.rsqrt(o.square().mean((-1, -2), keepdim=True) + eps)
        return (o * scale * o_norm).flatten(1) * gate.sigmoid()

    check_control(kda_decode, SMALL, _broken(gated_norm=wide))


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_cells(self, dtype):
        check_cell(kda_decode, SMALL, "triton", dtype=dtype)

    @pytest.mark.parametrize("tiles", [(32, 1, 4), (16, 2, 4), (8, 4, 2)], ids=str)
    def test_configurations(self, tiles):
        check_cell(_probe(_configured(tiles)), SMALL, "probe", dtype=torch.bfloat16)

    def test_published_head(self):
        cell = Cell("one head", R=2, H=1, S=4, SLOTS=4, lower_bound=-5.0, **HEAD)
        check_cell(kda_decode, cell, "triton", dtype=torch.bfloat16)

    def test_sequence(self):
        check_sequence(kda_decode, ONE, "triton", steps=3)

    def test_replay(self):
        check_replay(kda_decode, ONE, "triton")

    def test_rows_do_not_depend_on_their_neighbours(self):
        first, second = (draw(kda_decode, SMALL, dtype=torch.bfloat16) for _ in range(2))
        second["qkv"][1:] = 3.0
        second["recurrent"][second["slots"][1:]] = 7.0
        run = kda_decode.using("triton")
        assert torch.equal(run(**first)[0], run(**second)[0])
        slot = first["slots"][0]
        assert torch.equal(first["recurrent"][slot], second["recurrent"][slot])

    def test_refuses_heads_that_are_no_power_of_two(self):
        cell = Cell("", R=1, H=1, S=3, SLOTS=2, lower_bound=-5.0, K=24, V=32, W=4)
        with pytest.raises(ContractError, match="power of two"):
            kda_decode.using("triton")(**draw(kda_decode, cell, dtype=torch.float32))

    def test_control_weights_of_the_next_channel(self):
        def broken(*, conv_weight, **others):
            return _configured((32, 2, 4))(conv_weight=conv_weight.roll(1, 0), **others)

        check_control(kda_decode, SMALL, broken)


def _configured(tiles):
    def run(**arguments):
        from tercel.ops.linear_attention.kda_decode import kernel_triton

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_triton, "TILES", ((1 << 30, Tiles(*tiles)),))
            return kernel_triton.kda_decode(**arguments)

    return run


def _probe(run):
    held = (kda_decode.implementation("reference"), Implementation("probe", run))
    return Op(kda_decode.__wrapped__, CONTRACT, held)
