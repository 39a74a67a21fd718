"""How a matrix lies in a checkpoint: plain, MXFP4, NVFP4, or FP8 in blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from tercel.core import fp8
from tercel.weights.rows import Source
from tercel.weights.transforms import as_stored, first


@dataclass(frozen=True)
class Stored:
    """How one tensor of a matrix [rows, columns] lies in the checkpoint."""

    leaf: str
    """Last part of its name."""
    dtype: str
    shape: Callable[[int, int], tuple[int, ...]]
    """From the matrix's rows and columns; () where the tensor is one value for the matrix."""
    row_dtype: torch.dtype | None = None
    """Row.dtype of the weight that it becomes."""


@dataclass(frozen=True)
class MatrixFormat:
    fields: Mapping[str, Stored]
    """Suffix of the target field -> stored tensor."""
    block_scale: Stored | None = None
    """What the loader multiplies the field with."""
    unread: tuple[Stored, ...] = ()
    """What is stored besides, for kernels that quantize activations too."""

    @property
    def read(self) -> tuple[Stored, ...]:
        """What the values of a matrix follow from."""
        scales = () if self.block_scale is None else (self.block_scale,)
        return (*self.fields.values(), *scales)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Everything that is written for a matrix."""
        return (*self.read, *self.unread)


def _per_block(size: int) -> Callable[[int, int], tuple[int, ...]]:
    """One value per `size` columns."""
    return lambda rows, columns: (rows, columns // size)


def _one_value(rows: int, columns: int) -> tuple[int, ...]:
    return ()


MATRIX_FORMATS: Mapping[str, MatrixFormat] = {
    "plain": MatrixFormat({"": Stored("weight", "BF16", _per_block(1))}),
    "mxfp4": MatrixFormat(
        {
            "": Stored("weight_packed", "U8", _per_block(2), torch.uint8),
            "_scale": Stored("weight_scale", "U8", _per_block(32), torch.uint8),
        }
    ),
    "nvfp4": MatrixFormat(
        {
            "": Stored("weight", "U8", _per_block(2), torch.uint8),
            "_scale": Stored("weight_scale", "F8_E4M3", _per_block(16), torch.float8_e4m3fn),
            "_scale_2": Stored("weight_scale_2", "F32", _one_value, torch.float32),
        },
        unread=(Stored("input_scale", "F32", _one_value),),
    ),
    "fp8_block": MatrixFormat(
        {"": Stored("weight", "F8_E4M3", _per_block(1))},
        block_scale=Stored("weight_scale", "F32", fp8.scale_shape),
    ),
}


def matrix_format(key: str, dtypes: Mapping[str, str | None]) -> str:
    """The format of the matrix `key`, read from the tensors that there are, not from the config.

    Args:
        dtypes: of every tensor; None where only its name is known. `weight_scale` exists in three
            formats, and tells them apart by its dtype.
    """
    weight, scale = dtypes.get(f"{key}.weight"), dtypes.get(f"{key}.weight_scale")
    if f"{key}.weight_packed" in dtypes or scale == "U8":
        return "mxfp4"
    if weight == "U8" or scale == "F8_E4M3" or f"{key}.weight_scale_2" in dtypes:
        return "nvfp4"
    if weight == "F8_E4M3" or f"{key}.weight_scale" in dtypes:
        return "fp8_block"
    return "plain"


def stored_parts(source: Source, form: MatrixFormat) -> dict[str, Source]:
    """Suffix of the target field -> the stored tensor that holds this part of a matrix."""
    parts = {suffix: _part(source, stored) for suffix, stored in form.fields.items()}
    if form.block_scale is not None:
        scale = replace(_part(source, form.block_scale), axis=None, view=as_stored)
        parts[""] = replace(parts[""], block_scale=scale)
    return parts


def unread_parts(source: Source, form: MatrixFormat) -> tuple[Source, ...]:
    """The tensors that lie beside this matrix and are not loaded."""
    return tuple(_part(source, stored) for stored in form.unread)


def _part(source: Source, stored: Stored) -> Source:
    shape = stored.shape(*source.shape)
    key = source.key.removesuffix("weight") + stored.leaf
    if not shape:  # stored as [] or [1], and the same on every rank
        return Source(key, shape, stored.dtype, view=first(1), used=1)
    return replace(source, key=key, shape=shape, dtype=stored.dtype)
