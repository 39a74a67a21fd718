"""The routed experts of this rank, for any number of tokens.

    h_i = act(w13[e_i] @ z)                     e_i = ids[i] - first_expert, fp32 sums
    a_i = activation(h_i)                       rounded as situ_mul or silu_mul round
    t_i = act(w2[e_i] @ a_i)
    y   = act(sum_i weights_i * t_i)            fp32, over the slots in order, one rounding

Slots whose expert lives on another rank add nothing. Weights are act, or the codes and scales of
tercel.core.mxfp4 or nvfp4 used at their values: activations are never quantized (W4A16).
Source: Kimi K3 modeling_kimi_linear.py, KimiSparseMoeBlock.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError

AXES = {
    "T": "tokens",
    "k": "experts per token",
    "E": "experts of this rank",
    "I": "width of an expert on this rank",
    "L": "the latent that experts read and write",
    "P1": "warps that share a tile of w13, where it is packed (ops/_lib/expert_tiles.py)",
    "N1": "loads of each of them",
    "O1": "words of scales of each of them",
    "P2": "the same of w2",
    "N2": "the same of w2",
    "O2": "the same of w2",
}
ARGS: Mapping[str, Arg | Value] = {
    "z": Arg("T L"),
    "ids": Arg("T k", "i64"),
    "weights": Arg("T k", "f32"),
    "w13": Arg("E 2*I L|E 2*I L//2|E I//8 P1 N1 32 4", "act|u8|i32"),
    "w13_scale": Arg("E 2*I L//32|E 2*I L//16|E I//8 P1 O1 32", "u8|e4m3|i32", optional=True),
    "w2": Arg("E L I|E L I//2|E L//16 P2 N2 32 4", "act|u8|i32"),
    "w2_scale": Arg("E L I//32|E L I//16|E L//16 P2 O2 32", "u8|e4m3|i32", optional=True),
    "w13_scale_2": Arg("E 2", "f32", optional=True),
    "w2_scale_2": Arg("E 1", "f32", optional=True),
    "first_expert": Value(int, "id of this rank's first expert"),
    "activation": Value(str, "situ or silu"),
    "beta": Value((float, NoneType), "of situ"),
    "linear_beta": Value((float, NoneType), "of situ"),
}
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale", "w13_scale_2", "w2_scale_2")
TOLERANCE = Tolerance(
    element_ulps=4,
    rms_ulps=1.5,
    fp32_element_ulps=40,
    fp32_rms_ulps=40,
    why="four roundings of half an ulp in a row (FC1, activation, FC2, result), each of which the "
    "next product averages; in fp32 sums of up to L and I terms and the activation's functions, "
    "whose errors a second sum may cancel against",
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, chosen, experts = cell["T"], cell["k"], cell["E"]
    total = cell.get("total", experts)
    at_once = tokens if cell.get("apart") else 1  # whether no two slots share an expert
    drawn = [make.choice(at_once * chosen, low=0, high=total) for _ in range(tokens // at_once)]
    situ = cell.get("activation", "situ") == "situ"
    return {
        "z": make.normal(tokens, cell["L"]),
        "ids": torch.cat(drawn).reshape(tokens, chosen),
        "weights": make.uniform(tokens, chosen, low=0.05, high=2.0 / chosen, dtype="f32"),
        **_weights(cell, make),
        "first_expert": cell.get("first", 0),
        "activation": "situ" if situ else "silu",
        "beta": 4.0 if situ else None,
        "linear_beta": 25.0 if situ else None,
    }


def _weights(cell: Cell, make: InputMaker) -> dict[str, Any]:
    experts, width, latent, nvfp4 = cell["E"], cell["I"], cell["L"], cell.get("nvfp4")
    if not nvfp4 and not cell.get("mxfp4"):
        return {
            "w13": make.normal(experts, 2 * width, latent, scale=2 * latent**-0.5),
            "w13_scale": None,
            "w2": make.normal(experts, latent, width, scale=width**-0.5),
            "w2_scale": None,
        }

    def codes(rows: int, columns: int) -> torch.Tensor:
        return make.integers(experts, rows, columns // 2, low=0, high=256, dtype="u8")

    def scale(rows: int, columns: int) -> torch.Tensor:
        if nvfp4:
            return make.uniform(experts, rows, columns // 16, low=0.5, high=4.0, dtype="e4m3")
        return make.integers(experts, rows, columns // 32, low=121, high=125, dtype="u8")

    def scale_2(parts: int) -> torch.Tensor | None:
        return make.uniform(experts, parts, low=0.01, high=0.04, dtype="f32") if nvfp4 else None

    return {
        "w13": codes(2 * width, latent),
        "w13_scale": scale(2 * width, latent),
        "w2": codes(latent, width),
        "w2_scale": scale(latent, width),
        "w13_scale_2": scale_2(2),
        "w2_scale_2": scale_2(1),
    }


def valid(*, ids: torch.Tensor, **_: Any) -> None:
    ordered = ids.sort(dim=1).values
    if bool((ordered < 0).any()):
        raise ContractError(f"ids: {int(ordered.min())} is not an expert")
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ContractError("ids: a token names an expert twice")


def cost(sizes: Mapping[str, int]) -> Cost:
    """Every slot on a different expert, as far as there are so many."""
    tokens, slots, experts = sizes["T"], sizes["T"] * sizes["k"], sizes["E"]
    stored = sum(sizes.get(f"{name}_bytes", 0) for name in WEIGHTS)
    read = stored * min(slots, experts) // experts
    moved = 2 * tokens * sizes["L"] * sizes["act"] + 12 * slots
    return Cost(bytes=read + moved, flops=6 * slots * sizes["I"] * sizes["L"])


WHERE = (
    "(w13_scale is None) == w13.is_floating_point()",
    "(w2_scale is None) == w2.is_floating_point()",
    "w13.dtype == w2.dtype",
    "(w13_scale_2 is None) == (w13_scale is None or not w13_scale.is_floating_point())",
    "(w2_scale_2 is None) == (w2_scale is None or not w2_scale.is_floating_point())",
    "(w13_scale_2 is None) == (w2_scale_2 is None)",
    "activation in ('situ', 'silu')",
    "activation == 'silu' or (beta is not None and beta > 0)",
)

CONTRACT = Contract(
    axes=AXES,
    args=ARGS,
    returns={"y": Arg("T L")},
    cost=cost,
    inputs=inputs,
    where=WHERE,
    valid=valid,
    weights=WEIGHTS,
    cells=(
        Cell("nano prefill", ("tp1",), T=41, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano, one token", ("tp1",), T=1, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("bf16 experts with SiLU", ("tp1",), T=19, k=2, E=6, L=64, I=96, activation="silu"),
        Cell("a quarter of the experts", T=23, k=4, E=4, L=64, I=32, total=16, first=4),
        Cell("NVFP4, a second scale per matrix", ("tp1",), T=9, k=4, E=6, L=64, I=32, nvfp4=True),
        Cell("blocks of slots", T=20, k=2, E=4, L=256, I=256, mxfp4=True),
        Cell("no token on this rank", T=2, k=2, E=1, L=64, I=32, total=9, first=9),
        Cell("two blocks of two pieces", T=100, k=2, E=2, L=768, I=768, mxfp4=True),
    ),
    tolerance=TOLERANCE,
)
