"""moe/route and the MXFP8 form of what the experts read, in one launch.

    s       = sigmoid(logits)                                    fp32
    ids     = the top_k experts of s + bias, best first, ties to the lower id
    weights = f32(f64(s[ids]) * scaling / (f64(sum of s[ids]) + 1e-20))      without the bias
    scale   = 2 ** ceil(log2(largest / 448))                     per 32 values of z, rounded up
    codes   = e4m3(z / scale)                                    ties to even

Nothing is differentiated: inputs that require a gradient are taken detached.
Source: Kimi K3 modeling_kimi_linear.py, the MoE gate (noaux_tc with one group); OCP Microscaling
formats v1.0.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker

MAX_TOKENS = 64
EXACT = Tolerance(
    0, 0, "quantized by a rule that fp32 carries out exactly: every bit is the rule's"
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "logits": make.normal(cell["T"], cell["E"], dtype="f32"),
        "bias": make.normal(cell["E"], scale=0.1, dtype="f32"),
        "z": make.normal(cell["T"], cell["L"], scale=cell.get("scale", 1.0)),
        "top_k": cell["top_k"],
        "scaling": cell.get("scaling", 1.0),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, experts, latent = sizes["T"], sizes["E"], sizes["L"]
    routed = 4 * (tokens + 1) * experts + 12 * tokens * sizes["top_k"]
    quantized = tokens * latent * (sizes["act"] + 1) + tokens * latent // 32
    return Cost(bytes=routed + quantized, flops=tokens * (5 * experts + 3 * latent))


CONTRACT = Contract(
    axes={"T": "tokens", "E": "experts of all ranks", "L": "the latent that experts read"},
    args={
        "logits": Arg("T E", "f32"),
        "bias": Arg("E", "f32"),
        "z": Arg("T L"),
        "top_k": Value(int, "experts per token"),
        "scaling": Value(float, "of the weights"),
    },
    returns={
        "ids": Arg("T top_k", "i64"),
        "weights": Arg("T top_k", "f32"),
        "codes": Arg("T L", "e4m3"),
        "scale": Arg("T L//32", "u8"),
    },
    cost=cost,
    inputs=inputs,
    where=("1 <= top_k <= E", "L % 32 == 0", f"T <= {MAX_TOKENS}"),
    cells=(
        Cell("nano decode", ("tp1",), T=1, E=16, top_k=4, L=128),
        Cell("nano batch", ("tp1",), T=8, E=16, top_k=4, L=128),
        Cell("K3, one token", ("tp16_moetp4ep4",), T=1, E=896, top_k=16, L=3584, scaling=2.827),
        Cell("K3, odd count", ("tp16_moetp4ep4",), T=5, E=896, top_k=16, L=3584, scaling=2.5),
        Cell("tiny values", T=2, E=12, top_k=3, L=96, scale=1e-30),
        Cell("huge values", T=2, E=12, top_k=3, L=96, scale=1e30),
    ),
    tolerance={
        "ids": EXACT,
        "weights": Tolerance(
            element_ulps=6,
            rms_ulps=3,
            why="fp32: sigmoid and a sum of top_k scores; the division rounds once; ids are exact",
        ),
        "codes": EXACT,
        "scale": EXACT,
    },
    hazards=(Hazard("capacity", f"more than {MAX_TOKENS} tokens", ("logits",), raises=True),),
)
