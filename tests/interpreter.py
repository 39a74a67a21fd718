"""Triton kernels on a CPU: its interpreter, made right where it is wrong, and faster.

Without a GPU the kernels of this project run interpreted. Six things need help: a dot of bf16
multiplies the raw bits of its operands, a cast of fp32 to bf16 cuts bits off instead of rounding to
nearest, casts from and to e4m3 are wrong for NaN, a sum along an axis that is not the last adds one
term after the other where a GPU adds in a tree, and the grid-dependency instructions and inline
assembly are unknown, of which a prefetch changes nothing that a program sees. Four cost most of its
time for nothing: every call of a device function replaces the functions of the language again,
every operation builds the table of numpy's types, every sum of integers computes whether it
overflows for an assertion that is off, and a reduction by a function of ours, or by the xor of a
sort, goes one element at a time.
"""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and not torch.cuda.is_available()
REASON = "needs Triton's interpreter"


def implementations(op: Any, *plain: str) -> list[Any]:
    """Parameters for tests that hold for an op's fastest plain form, or those named, and for its
    Triton kernel."""
    kernel = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=REASON))
    return [*(plain or (op.portable.name,)), kernel]


def enable() -> None:
    """Called before anything imports triton, which decides at import how it runs functions."""
    if not INTERPRETED:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.language.extra import cuda
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    cuda.gdc_wait = cuda.gdc_launch_dependents = _nothing
    if InterpreterBuilder.create_dot is not _dot:
        mends = {
            "create_dot": _dot,
            "cast_impl": _cast,
            "create_fp_to_fp": _fp8,
            "create_inline_asm": _assembly,
        }
        for name, mended in mends.items():
            setattr(InterpreterBuilder, f"plain_{name}", getattr(InterpreterBuilder, name))
            setattr(InterpreterBuilder, name, mended)
        _hasten(interpreter)


def _hasten(interpreter: Any) -> None:
    """Replaces the language's functions once, keeps the types, computes no overflow, and reduces
    whole tensors."""
    import triton.language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _function: interpreter._LangPatchScope()
    of_dtype, known = interpreter._get_np_dtype, {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.scalar.is_ptr():
            return of_dtype(dtype)
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_dtype(dtype)
        return known[name]

    interpreter._get_np_dtype = numpy_type
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ReduceOps.sum = _sum


def _sum(reduction: Any, terms: Any) -> Any:
    """In pairs, as numpy adds where terms lie next to each other."""
    data, axis = terms.handle.data, reduction.axis
    if axis is None:
        total = data.sum(keepdims=reduction.keep_dims)
    else:
        total = np.ascontiguousarray(np.moveaxis(data, axis, -1)).sum(-1)
        total = np.expand_dims(total, axis) if reduction.keep_dims else total
    return reduction.to_tensor(total, terms.dtype)


def _reduce(reduction: Any, inputs: Any) -> list[Any]:
    """Combines neighbours along the axis until one is left."""
    rank, axis = inputs[0].handle.data.ndim, reduction.axis
    inputs, along = reduction.unravel(inputs, axis)
    arrays = [np.moveaxis(each.handle.data, along, -1) for each in inputs]
    types = [(each.dtype, each.handle.data.dtype) for each in inputs]
    while arrays[0].shape[-1] > 1:
        halves = [
            reduction.to_tensor(np.ascontiguousarray(array[..., start::2]), dtype)
            for start in (0, 1)
            for array, (dtype, _) in zip(arrays, types, strict=True)
        ]
        found = reduction.combine_fn.fn(*halves)
        found = found if isinstance(found, tuple) else (found,)
        arrays = [x.handle.data.astype(t) for x, (_, t) in zip(found, types, strict=True)]
    results = []
    for array, (dtype, _) in zip(arrays, types, strict=True):
        if not reduction.keep_dims:
            result = array[..., 0]
        else:
            result = array.reshape((1,) * rank) if axis is None else np.moveaxis(array, -1, along)
        results.append(reduction.to_tensor(result, dtype))
    return results


def _nothing(_semantic: Any = None) -> None:
    """One program at a time: there is nobody to wait for."""


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """The interpreter's dot, with bf16 operands widened to fp32."""
    import triton.language as tl

    a, b = (_cast(builder, x, tl.float32) if _is_bf16(x.dtype) else x for x in (a, b))
    return builder.plain_create_dot(a, b, d, *options)


def _cast(builder: Any, value: Any, dst_type: Any) -> Any:
    """The interpreter's cast, with torch's rounding between fp32 and bf16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    source, target = value.dtype.scalar, dst_type.scalar
    if source == tl.float32 and _is_bf16(target):
        rounded = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16()
        data = rounded.view(torch.int16).numpy().view(np.uint16)
    elif _is_bf16(source) and target == tl.float32:
        data = (value.data.astype(np.uint32) << 16).view(np.float32)
    else:
        return builder.plain_cast_impl(value, dst_type)
    return TensorHandle(data, target)


def _fp8(builder: Any, value: Any, dst_type: Any, *rounding: Any) -> Any:
    """The interpreter's cast between floats, with torch's e4m3."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    source, target = value.dtype.scalar, dst_type.scalar
    if source == tl.float8e4nv:
        codes = torch.from_numpy(np.ascontiguousarray(value.data)).view(torch.float8_e4m3fn)
        return _cast(builder, TensorHandle(codes.float().numpy(), tl.float32), target)
    if target == tl.float8e4nv:
        wide = torch.from_numpy(np.ascontiguousarray(_cast(builder, value, tl.float32).data))
        return TensorHandle(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target)
    return builder.plain_create_fp_to_fp(value, dst_type, *rounding)


class _Zeros:
    """What a prefetch gives back, because every piece of assembly must give something."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._shape, self._dtype = shape, dtype

    def get_result(self, _index: int) -> Any:
        from triton.runtime.interpreter import TensorHandle

        return TensorHandle(np.zeros(self._shape, np.int32), self._dtype)


def _assembly(builder: Any, text: str, constraints: str, values: Any, *options: Any) -> Any:
    """Prefetches do nothing; other assembly cannot be interpreted."""
    import triton.language as tl

    if not text.startswith("prefetch."):
        return builder.plain_create_inline_asm(text, constraints, values, *options)
    return _Zeros(values[0].data.shape, tl.int32)


def _is_bf16(dtype: Any) -> bool:
    import triton.language as tl

    return bool(dtype.scalar == tl.bfloat16)
