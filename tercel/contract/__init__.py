"""Contracts as data, and the machinery that checks ops against them."""

from tercel.contract.contract import Arg, Cell, Contract, Cost, Hazard, StateSpec, Tolerance, Value
from tercel.contract.op import (
    PLAIN,
    Implementation,
    Op,
    kernel,
    operation,
    ordered,
    portable,
    reference,
)

__all__ = [
    "PLAIN",
    "Arg",
    "Cell",
    "Contract",
    "Cost",
    "Hazard",
    "Implementation",
    "Op",
    "StateSpec",
    "Tolerance",
    "Value",
    "kernel",
    "operation",
    "ordered",
    "portable",
    "reference",
]
