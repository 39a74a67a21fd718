"""The routed experts of a prefill chunk at Kimi K3's shapes on a rank of tp16_moetp4ep4.

    python -m benchmarks.experts_prefill [--tokens 4096 512] [--sweep] [--check]

Uniform routing over 896 experts, of which 224 are here. Prints every launch, and with --sweep the
two products cut in other ways; --check first compares every cut with the Triton kernels. The best
public kernel (humming 0.1.12) takes 538 us for gate_up and 315 us for down at 4096 tokens in W4A16,
280 and 218 us in W4A8 with one scale a token.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.experts import ACTIVATION, LATENT, Case, weights
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib import kernel_slot_products as triton_form
from tercel.ops._lib import kernel_slot_streams as gluon_form
from tercel.ops._lib.expert_tiles import SPAN
from tercel.ops._lib.kernel_activation import gated_product
from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3
from tercel.ops._lib.kernel_slot_products import Config, Matrix, reordered
from tercel.ops._lib.kernel_slot_streams import Stream
from tercel.ops._lib.kernel_slot_wgmma import Block
from tercel.ops._lib.kernel_slots import combine, sort
from tercel.ops.moe.experts_grouped import experts_grouped
from tercel.ops.moe.experts_grouped_e4m3 import experts_grouped_e4m3

EXPERTS, TOTAL, WIDTH, CHOSEN = 224, 896, 768, 16
CALLS = 2
LARGEST = 121
"""The largest scale byte that is drawn."""
ALL = [Stream(Block((64, 32)), 3), Stream(Block((64, 32)), 4), Block((64, 32), 4)]
ALL += [Block((64, 32), 4, stages=4), Block((64, 32), 8), Block((64,), 4)]
ALL += [Block((64,), 4, stages=4), Block((128,), 4, stages=4), Block((64, 16), 4, stages=4)]
ALL += [Block((32,), 4), Block((32,), 4, stages=4), Block((32,), 8), Block((32, 16), 4, stages=4)]
ALL += [Stream(Block((64,)), 3), Stream(Block((64,)), 4), Stream(Block((32,)), 4)]
ALL += [Block((16,), 4), Block((16,), 4, stages=4), Stream(Block((16,)), 4)]
FEW = ALL[:4]
TRITON = Config(slots=128)


class Inputs:
    """Of one number of tokens."""

    def __init__(self, tokens: int) -> None:
        words, scales, down_words, down_scales = weights(Case("prefill", EXPERTS, WIDTH, tokens, 4))
        self.up, self.down = Matrix(words, scales), Matrix(down_words, down_scales)
        self.up_e4m3, self.down_e4m3 = _for_e4m3(self.up), _for_e4m3(self.down)
        generator = torch.Generator().manual_seed(0)
        order = [torch.randperm(TOTAL, generator=generator)[:CHOSEN] for _ in range(tokens)]
        self.ids = torch.stack(order).cuda()
        self.shares = torch.rand(tokens, CHOSEN, device="cuda") / 8
        self.z = torch.randn(tokens, LATENT, device="cuda", dtype=torch.bfloat16)
        slots = self.ids.numel()
        self.hidden = torch.randn(slots, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.outputs = torch.randn(slots, LATENT, device="cuda", dtype=torch.bfloat16)

    def sort(self, rows: int):
        return sort(self.ids, 0, EXPERTS, rows)


def _for_e4m3(matrix: Matrix) -> Matrix:
    """Random words are also random codes in the other form; scales are powers above the least."""
    experts, tiles = matrix.values.shape[:2]
    powers = (matrix.scales.view(torch.uint8) - (LARGEST - SPAN - 1)).view(torch.int32)
    rows = torch.full((experts, 16 * tiles), LARGEST, dtype=torch.uint8, device="cuda")
    return Matrix(matrix.values, powers, rows)


def product(form, cut, given: Inputs, is_up: bool, e4m3: bool, four: bool, out=None):
    """A call of one product, its inputs made here."""
    slots = given.sort(cut.slots)
    source = given.z if is_up else given.hidden
    if e4m3:
        matrix = given.up_e4m3 if is_up else given.down_e4m3
        x, scale = rows_in_e4m3(source, None if is_up else slots, four=four)
    else:
        matrix = given.up if is_up else given.down
        x, scale = reordered(source), None
    is_raw = is_up and e4m3 and isinstance(cut, Stream)
    width = 2 * WIDTH if is_raw else WIDTH if is_up else LATENT
    out = source.new_zeros(given.ids.numel(), width) if out is None else out
    return partial(form, x, scale, slots, matrix, out, cut, ACTIVATION if is_up else None)


def whole(given: Inputs, op, up: Matrix, down: Matrix):
    """A call of an op's Hopper kernel."""
    weights = (up.values, up.scales, down.values, down.scales, up.largest, down.largest)
    name, beta, linear_beta = ACTIVATION
    act = {"activation": name, "beta": beta, "linear_beta": linear_beta, "first_expert": 0}
    run = op.implementation("gluon").run
    return partial(run, given.z, given.ids, given.shares, *weights, **act)


def check(given: Inputs, cuts: list[Block]) -> None:
    for e4m3 in (False, True):
        for is_up in (True, False):
            expected = product(triton_form.product, TRITON, given, is_up, e4m3, False)().float()
            for cut in cuts:
                try:
                    run = product(gluon_form.product, cut, given, is_up, e4m3, True)
                    ours = _activated(run(), expected.shape[1]).float()
                    error = float((ours - expected).abs().max() / expected.abs().max())
                    rms = float((ours - expected).norm() / expected.norm())
                    print(f"  e4m3 {e4m3} up {is_up} {cut}: {error:.1e} {rms:.1e}", flush=True)
                except Exception as error:
                    print(f"  {e4m3} {is_up} {cut}: {type(error).__name__} {error}"[:300])


def _activated(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows as a product has them that activates; eight gates and eight ups take turns."""
    if rows.shape[1] == width:
        return rows
    both = rows.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    return gated_product(both, ACTIVATION.beta, ACTIVATION.linear_beta)


def measure(given: Inputs, cuts: list[Block], rounds: int) -> None:
    tokens = len(given.z)
    graphs: dict[str, Callable[[], object]] = {}

    def add(name: str, make: Callable[..., Callable[[], object]], *arguments: object) -> None:
        try:
            graphs[name] = in_graph([make(*arguments)] * CALLS)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)

    add("whole W4A16", lambda: whole(given, experts_grouped, given.up, given.down))
    add("whole W4A8", lambda: whole(given, experts_grouped_e4m3, given.up_e4m3, given.down_e4m3))
    slots = given.sort(96)
    add("sort", partial, given.sort, 96)
    add("reorder", partial, reordered, given.z)
    add("combine", partial, combine, given.outputs, given.ids, given.shares, 0, EXPERTS)
    add("z in e4m3", lambda: partial(rows_in_e4m3, given.z, four=True))
    add("h in e4m3", lambda: partial(rows_in_e4m3, given.hidden, slots, four=True))
    both = torch.randn(len(given.hidden), 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    activated = partial(rows_in_e4m3, four=True, activation=ACTIVATION)
    add("h activated, in e4m3", lambda: partial(activated, both, slots))
    for is_up in (True, False):
        name = "FC1" if is_up else "FC2"
        add(f"{name} triton", product, triton_form.product, TRITON, given, is_up, False, False)
        for e4m3 in (False, True):
            for cut in cuts:
                text = f"{name} {'A8 ' if e4m3 else 'A16'} {_text(cut)}"
                add(text, product, gluon_form.product, cut, given, is_up, e4m3, True)
    rows = int(slots.counts.sum())
    print(f"{tokens} tokens, {rows} slots here")
    for name, timing in interleave(graphs, rounds=rounds, device="cuda").items():
        each = timing.per(CALLS)
        flops = 2 * rows * WIDTH * LATENT * {"FC1": 2, "FC2": 1}.get(name[:3], 0)
        rate = f"{flops / each.median_us / 1e6:5.0f} TFLOP/s" if flops else ""
        spread = f"{each.low_us:.1f}..{each.high_us:.1f}"
        print(f"  {name:28} {each.median_us:8.1f} us ({spread}) {rate}", flush=True)


def _text(cut: Block | Stream) -> str:
    if isinstance(cut, Stream):
        return f"{cut.block.pieces} stream {cut.stages}"
    return f"{cut.pieces} {cut.warps} {cut.stages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 512, 64])
    parser.add_argument("--sweep", action="store_true", help="other cuts too")
    parser.add_argument("--cuts", nargs="*", type=int, help="which of the sweep's")
    parser.add_argument("--check", action="store_true", help="compare and time nothing")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    copy = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e9:.0f} GB/s", flush=True)
    for tokens in options.tokens:
        given, cuts = Inputs(tokens), ALL if options.sweep else FEW
        if options.cuts is not None:
            cuts = [ALL[index] for index in options.cuts]
        if options.check:
            check(given, cuts)
        else:
            measure(given, cuts, options.rounds)


if __name__ == "__main__":
    main()
