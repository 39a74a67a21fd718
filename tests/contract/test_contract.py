"""Contracts read shapes, dtypes and layouts, and refuse before anything runs."""

import pytest
import torch

from tercel.contract import Arg, Cell, Contract, Cost, Op, Tolerance, Value, operation, reference
from tercel.errors import ContractError

TOLERANCE = Tolerance(1, 1, why="the op adds once and rounds once")


def contract(**changes) -> Contract:
    fields = {
        "axes": {"T": "tokens", "H": "heads", "K": "channels"},
        "args": {
            "x": Arg("T 2*H*K", layout="rows"),
            "heads": Arg("H", "f32"),
            "state": Arg("T K", "f32", written="all rows", optional=True),
            "scale": Value(float),
        },
        "returns": {"y": Arg("T H*K"), "z": Arg("T", "f32")},
        "cost": lambda sizes: Cost(sizes["T"] * sizes["H"] * sizes["act"]),
        "cells": (Cell("one point", layouts=("tp1",), T=2, H=3, K=4),),
        "inputs": lambda cell, make: {
            "x": make.normal(cell["T"], 2 * cell["H"] * cell["K"]),
            "heads": make.normal(cell["H"], dtype="f32"),
            "state": make.poison(cell["T"], cell["K"], dtype="f32"),
            "scale": 1.0,
        },
        "tolerance": TOLERANCE,
    }
    return Contract(**{**fields, **changes})


def arguments(**changes):
    values = {
        "x": torch.zeros(2, 24),
        "heads": torch.zeros(3),
        "state": torch.zeros(2, 4),
        "scale": 1.0,
    }
    return {**values, **changes}


def test_binds_axes_from_metadata():
    sizes = contract().bind(arguments())
    assert (sizes["T"], sizes["H"], sizes["K"]) == (2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 25)}, r"x: axis 2\*H\*K is 25, expected 24"),
        ({"x": torch.zeros(24)}, r"x: shape \(24,\) is not \[T 2\*H\*K\]"),
        ({"heads": torch.zeros(3, dtype=torch.float16)}, "heads: dtype torch.float16 is not f32"),
        ({"heads": None}, r"heads: missing; pass a tensor \[H\]"),
        ({"heads": [1.0]}, "heads: expected a tensor"),
        ({"state": torch.zeros(3, 4)}, "state: axis T is 3, expected 2"),
        ({"scale": 1}, "scale: 1 is a int, expected float"),
        ({"x": torch.zeros(24, 2).t()}, "x: must be rows"),
        ({"x": torch.zeros(2, 24, dtype=torch.int32)}, "x: dtype torch.int32 is not act"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ContractError, match=message):
        contract().bind(arguments(**changes))


def test_optional_arguments_may_be_missing():
    with pytest.raises(ContractError, match="does not follow from the arguments"):
        contract(returns={"y": Arg("T Q")}).shape_only(arguments(state=None))
    sizes = contract(args={**contract().args, "x": Arg("T N")}).bind(arguments(state=None))
    assert "K" not in sizes


def test_shape_only_computes_nothing():
    y, z = contract().shape_only(
        {
            name: v.to("meta") if isinstance(v, torch.Tensor) else v
            for name, v in arguments().items()
        }
    )
    assert (y.shape, y.dtype, y.device.type) == ((2, 12), torch.float32, "meta")
    assert (z.shape, z.dtype) == ((2,), torch.float32)


def test_cost_knows_the_activation_size():
    values = arguments(x=torch.zeros(2, 24, dtype=torch.bfloat16))
    assert contract().cost_of(values).bytes == 2 * 3 * 2


def test_one_activation_dtype_per_call():
    two = contract(args={**contract().args, "heads": Arg("H")})
    with pytest.raises(ContractError, match=r"heads: dtype torch.bfloat16 is not act \(act is"):
        two.bind(arguments(heads=torch.zeros(3, dtype=torch.bfloat16)))


def test_signature_and_contract_must_name_the_same_arguments():
    with pytest.raises(ContractError, match="name different arguments"):

        @operation(contract(), reference(lambda x: x))
        def wrong(x, heads, scale): ...


def test_unknown_implementation():
    @operation(contract(), reference(lambda x, heads, state, scale: (x, heads)))
    def op(x, heads, state, scale):
        """Args: none."""

    assert isinstance(op, Op)
    with pytest.raises(ContractError, match="no implementation 'triton'; there is reference"):
        op.using("triton")
