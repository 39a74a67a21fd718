"""fp64 masses of fp32 logits: exp((logit - largest) / temperature), in fifteen fp64 operations.

A GPU's own exp and division take more than twice as many, which would rule over the bytes of the
logits. 2 ** t is a polynomial of the fraction, whose coefficients are those of the least largest
relative error (1.3e-14) on [-1/2, 1/2], times a power of two in the exponent's bits.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
REACH = tl.constexpr(700.0)
"""Masses further from the largest, in temperatures, are taken to be here: 1e-304."""
ROUNDER = tl.constexpr(6755399441055744.0)
"""1.5 * 2 ** 52: adding it rounds to an integer, which the low bits of the sum then are."""


@triton.jit
def exp2(t):
    """2 ** t for fp64 t of -1020 .. 1."""
    rounded = t + ROUNDER
    x = t - (rounded - ROUNDER)
    y = 1.0150344092361341e-07 * x + 1.325940551832952e-06
    y = y * x + 1.5252984798658376e-05
    y = y * x + 0.0001540343494852222
    y = y * x + 0.00133335576176754
    y = y * x + 0.00961812919206659
    y = y * x + 0.05550410866868515
    y = y * x + 0.24022650695649655
    y = y * x + 0.693147180559871
    y = y * x + 1.0000000000000127
    power = rounded.to(tl.int64, bitcast=True) << 52
    return (y.to(tl.int64, bitcast=True) + power).to(tl.float64, bitcast=True)


@triton.jit
def masses(logits, most, heat):
    """fp64, 0 of -inf; `most` fp32 is at least as large as every logit, heat fp32 above 0."""
    near = tl.maximum(logits, most - REACH * heat)
    away = (near.to(tl.float64) - most.to(tl.float64)) * (LOG2_E / heat.to(tl.float64))
    return tl.where(logits == float("-inf"), 0.0, exp2(away))
