"""From one format of a matrix to another, and what that loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tercel.core import fp8, mxfp4, nvfp4
from tercel.errors import CheckpointError

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors of one matrix by the last part of their names."""


@dataclass
class Exactness:
    """What converting matrices of one kind from one format to another lost, added up."""

    kind: str
    source: str
    target: str
    matrices: int = 0
    inexact_matrices: int = 0
    values: int = 0
    inexact_values: int = 0
    worst_error: float = 0.0
    """Largest |new - old| of a value over the largest magnitude of its matrix."""
    worst_rms_error: float = 0.0
    """Largest RMS of a matrix's error over the RMS of the matrix."""

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        self.matrices += 1
        self.values += old.numel()
        if torch.equal(old, new):
            return
        error = new - old
        self.inexact_matrices += 1
        self.inexact_values += int(error.count_nonzero())
        self.worst_error = max(self.worst_error, float(error.abs().max() / old.abs().max()))
        self.worst_rms_error = max(self.worst_rms_error, float(error.norm() / old.norm()))


def requantize(
    matrices: Mapping[str, Tensors], source: str, target: str, exactness: Exactness
) -> dict[str, Tensors]:
    """Matrices by key in another of MATRIX_FORMATS; NVFP4 gives them one second scale.

    MXFP4 to plain is exact, and so is MXFP4 to NVFP4 while no block's exponent is more than 17
    below the largest, and back. Values are never changed beyond the nearest that `target` holds.

    Raises:
        CheckpointError: a matrix holds values that are not finite.
    """
    wide = torch.float32 if source == "mxfp4" else torch.float64
    old = {key: values(tensors, source, wide) for key, tensors in matrices.items()}
    for key, value in old.items():
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{key}: holds values that are not finite; it cannot be converted"
            )
    new = _converted(matrices, old, source, target)
    for key, value in old.items():
        exactness.add(value, values(new[key], target, wide))
    return new


def values(tensors: Tensors, form: str, dtype: torch.dtype) -> torch.Tensor:
    """What a stored matrix stands for."""
    if form == "mxfp4":
        return mxfp4.dequantize(tensors["weight_packed"], tensors["weight_scale"], dtype)
    if form == "nvfp4":
        scale_2 = tensors["weight_scale_2"].view(1)
        return nvfp4.dequantize(tensors["weight"], tensors["weight_scale"], scale_2, dtype)
    if form == "fp8_block":
        return fp8.dequantize(tensors["weight"], tensors["weight_scale"]).to(dtype)
    return tensors["weight"].to(dtype)


def _converted(
    matrices: Mapping[str, Tensors], old: Mapping[str, torch.Tensor], source: str, target: str
) -> dict[str, Tensors]:
    if target == "plain":
        return {
            key: {"weight": values(tensors, source, torch.bfloat16)}
            for key, tensors in matrices.items()
        }
    if target == "fp8_block":
        return {key: _named(fp8.quantize(w.float()), "weight") for key, w in old.items()}
    if target == "nvfp4":
        return _to_nvfp4(matrices, old, source)
    if source == "nvfp4":
        return {
            key: _named(
                nvfp4.to_mxfp4(t["weight"], t["weight_scale"], t["weight_scale_2"].view(1)),
                "weight_packed",
            )
            for key, t in matrices.items()
        }
    return {key: _named(mxfp4.quantize(w), "weight_packed") for key, w in old.items()}


def _to_nvfp4(
    matrices: Mapping[str, Tensors], old: Mapping[str, torch.Tensor], source: str
) -> dict[str, Tensors]:
    """By way of MXFP4 where the values are MXFP4's, else from the values."""
    if source == "mxfp4":
        coded = {key: (t["weight_packed"], t["weight_scale"]) for key, t in matrices.items()}
    else:
        coded = {key: mxfp4.quantize(w) for key, w in old.items()}
        if any(
            not torch.equal(mxfp4.dequantize(*coded[key], w.dtype), w) for key, w in old.items()
        ):
            scale_2 = nvfp4.scale_2_of(*old.values())
            return {key: _nvfp4(nvfp4.quantize(w, scale_2), scale_2) for key, w in old.items()}
    exponents = [nvfp4.largest_exponent(*each) for each in coded.values()]
    largest = max((each for each in exponents if each is not None), default=nvfp4.MAX_EXPONENT)
    shared = largest - nvfp4.MAX_EXPONENT
    scale_2 = torch.tensor([2.0**shared])
    return {key: _nvfp4(nvfp4.from_mxfp4(*each, shared), scale_2) for key, each in coded.items()}


def _named(pair: Sequence[torch.Tensor], first: str) -> Tensors:
    return {first: pair[0], "weight_scale": pair[1]}


def _nvfp4(pair: Sequence[torch.Tensor], scale_2: torch.Tensor) -> Tensors:
    """The input scale is 1, as published: nothing is known about the activations."""
    ones = torch.ones(())
    return {**_named(pair, "weight"), "weight_scale_2": scale_2.view(()), "input_scale": ones}
