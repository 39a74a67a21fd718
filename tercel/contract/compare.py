"""How far a result is from the reference, in units that a derivation can speak of."""

from dataclasses import dataclass

import torch

from tercel.contract.contract import Tolerance
from tercel.errors import CheckFailed


@dataclass(frozen=True)
class Error:
    """The distance of one result from its reference."""

    element_ulps: float
    rms_ulps: float
    element_allowed: float = 0.0
    """Of the tolerance that it was compared by."""
    rms_allowed: float = 0.0


def ulp(dtype: torch.dtype) -> float:
    """The rounding step of one: 2**-8 for bf16 with its 8 significant bits, 2**-24 for fp32."""
    return torch.finfo(dtype).eps / 2


def measure(
    actual: torch.Tensor, reference: torch.Tensor, unit: torch.dtype | None = None
) -> Error:
    """Errors of `actual` in ulps of `unit`, by default its own dtype; `reference` is fp64. NaN in
    both is equal."""
    poisoned = actual.isnan() & reference.isnan()
    difference = (actual.double() - reference.double()).masked_fill(poisoned, 0.0).abs()
    expected = reference.double().masked_fill(poisoned, 0.0)
    if difference.numel() == 0:
        return Error(0.0, 0.0)
    if not difference.isfinite().all():
        return Error(float("inf"), float("inf"))
    row_max = expected.abs().amax(dim=-1, keepdim=True) if expected.dim() else expected.abs()
    step = ulp(unit or actual.dtype)
    tiny = torch.finfo(torch.float32).tiny
    element = (difference / (row_max * step).clamp_min(tiny)).max()
    rms = difference.square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(tiny)
    return Error(float(element), float(rms) / step)


def compare(
    name: str,
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance,
    act: torch.dtype | None = None,
) -> Error:
    """Raises CheckFailed unless `actual` is within `tolerance`; integers must be equal. `act` is
    the call's activation dtype, for tolerances in its unit."""
    if actual.shape != reference.shape:
        raise CheckFailed(f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}")
    if not actual.is_floating_point():
        if not torch.equal(actual, reference.to(actual.dtype)):
            wrong = int((actual != reference).sum())
            raise CheckFailed(f"{name}: {wrong} of {actual.numel()} integers differ")
        return Error(0.0, 0.0)
    unit = act if act is not None and tolerance.unit == "act" else actual.dtype
    error = measure(actual, reference, unit)
    element, rms = tolerance.allowed(unit)
    if not (error.element_ulps <= element and error.rms_ulps <= rms):
        raise CheckFailed(
            f"{name}: worst element {error.element_ulps:.3g} ulps (allowed {element:.3g}), "
            f"rms {error.rms_ulps:.3g} ulps (allowed {rms:.3g})"
        )
    return Error(error.element_ulps, error.rms_ulps, element, rms)
