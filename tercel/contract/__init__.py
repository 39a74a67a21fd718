"""Contracts as data, and the machinery that checks ops against them."""

from tercel.contract.contract import Arg, Cell, Contract, Cost, Hazard, StateSpec, Tolerance, Value
from tercel.contract.op import Implementation, Op, kernel, operation, portable, reference

__all__ = [
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
    "portable",
    "reference",
]
