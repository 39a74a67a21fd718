"""What an op promises, as data: arguments, results, cost, cells, tolerance, hazards."""

import functools
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import torch

from tercel.errors import ContractError

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "bool": torch.bool,
}
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PLAIN_AXIS = re.compile(r"^[A-Za-z_]\w*$")
_MULTIPLE = re.compile(r"^(\d+)\*([A-Za-z_]\w*)$")
_QUOTIENT = re.compile(r"^([A-Za-z_]\w*)//(\d+)$")


@dataclass(frozen=True)
class Arg:
    """One tensor argument or result."""

    shape: str
    """Axes separated by spaces: names, numbers, or expressions of names such as 3*P. Where the
    shape depends on the dtype, one shape per alternative: "E I L|E I L//2" with "act|u8"."""
    dtype: str = "act"
    """A name in DTYPES, `act` for the call's activation dtype, or alternatives: "act|f32"."""
    layout: str = "contiguous"
    """contiguous; rows: the last axis is; any."""
    written: str = ""
    """Which part the op writes; empty: nothing."""
    optional: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return self.axes_as(self.dtype.split("|")[0])

    def axes_as(self, choice: str) -> tuple[str, ...]:
        """The axes of a tensor whose dtype is the alternative `choice`."""
        shapes = self.shape.split("|")
        index = self.dtype.split("|").index(choice) if len(shapes) > 1 else 0
        return tuple(shapes[index].split())


@dataclass(frozen=True)
class Value:
    """One argument that is a host value: a scale, a name, a tuple of lengths."""

    type: type | tuple[type, ...]
    what: str = ""


@dataclass(frozen=True)
class Cost:
    """The least a call can do: each input read once, each output written once."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True, init=False)
class Cell:
    """One certified point: why it matters, which layouts use it, and its axis sizes."""

    why: str
    layouts: tuple[str, ...]
    sizes: Mapping[str, Any]

    def __init__(self, why: str, layouts: tuple[str, ...] = (), **sizes: Any) -> None:
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "layouts", layouts)
        object.__setattr__(self, "sizes", sizes)

    def __getitem__(self, name: str) -> Any:
        return self.sizes[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.sizes.get(name, default)

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self.sizes.items())


@dataclass(frozen=True)
class Tolerance:
    """Errors against the fp64 reference, in units of the result dtype's rounding step."""

    element_ulps: float
    """Largest |error| of an element, in ulps of its row's largest magnitude."""
    rms_ulps: float
    """RMS of the error over RMS of the reference, in ulps of one."""
    why: str
    """How the two follow from the op's sums and roundings."""
    unit: str = "result"
    """Whose rounding step is the ulp: `result`, or `act` where a wider result, such as an fp32
    state, is computed from values that were rounded to activations."""
    fp32_element_ulps: float = 0.0
    """What sums and functions in fp32 add to element_ulps, in steps of fp32: the larger part of
    the tolerance in fp32, and next to nothing in bf16."""
    fp32_rms_ulps: float = 0.0
    """The same for rms_ulps."""

    def allowed(self, unit: torch.dtype) -> tuple[float, float]:
        """Element and RMS limits in ulps of `unit`."""
        ratio = torch.finfo(torch.float32).eps / torch.finfo(unit).eps
        return (
            self.element_ulps + self.fp32_element_ulps * ratio,
            self.rms_ulps + self.fp32_rms_ulps * ratio,
        )


@dataclass(frozen=True)
class Hazard:
    """A way to use the op wrongly. Either a check raises, or the text says that none can."""

    kind: str
    """aliasing, early_read, launch_order, capacity, ..."""
    what: str
    args: tuple[str, ...] = ()
    """For early_read: arguments read before the wait for the previous launch, whose writers must be
    over by then. Program resolution proves this (targets/launch_order.py)."""
    raises: bool = False
    when: str = ""
    """The argument whose truth makes this call run the risk; empty: every call does."""


@dataclass(frozen=True)
class StateSpec:
    """State that outlives a call: typed, owned by the caller, created before any capture."""

    contents: str
    create: Callable[..., Any]
    """create(place, group, **sizes) -> state; collective where the op is."""
    call_order: str
    """The order of calls that keeps the state right."""
    wrong_order: str
    """What a wrong order does."""
    shared_by: tuple[str, ...] = ()
    """Ops that may share one object."""


class InputMaker(Protocol):
    """Draws the inputs of a cell; see tercel.contract.draw.Maker."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: str = "act") -> torch.Tensor: ...
    def uniform(self, *shape: int, low: float, high: float, dtype: str = "act") -> torch.Tensor: ...
    def integers(self, *shape: int, low: int, high: int, dtype: str = "i64") -> torch.Tensor: ...
    def choice(self, count: int, *, low: int, high: int) -> torch.Tensor: ...
    def poison(self, *shape: int, dtype: str = "act") -> torch.Tensor: ...


@dataclass(frozen=True)
class Contract:
    """See the fields; `tercel.contract.op.operation` ties one to a public function."""

    args: Mapping[str, Arg | Value]
    returns: Mapping[str, Arg]
    cost: Callable[[Mapping[str, int]], Cost]
    """From axis sizes to bytes and flops. Among the sizes are `act`, the bytes of an activation,
    and for every tensor its bytes, as x_bytes."""
    cells: tuple[Cell, ...]
    inputs: Callable[[Cell, InputMaker], dict[str, Any]]
    """Draws one valid set of arguments for a cell."""
    tolerance: Tolerance | Mapping[str, Tolerance]
    """One for all results, or one per result and written argument."""
    valid: Callable[..., None] | None = None
    """Raises ContractError for arguments that the op would accept and answer wrongly. Tests run
    it before every cell; it is never on the hot path and may read tensors."""
    weights: tuple[str, ...] = ()
    """Arguments that an implementation may want packed, in the order its `pack` takes them."""
    hazards: tuple[Hazard, ...] = ()
    state: StateSpec | None = None
    keep: tuple[str, ...] = ()
    """Arguments that stay the same along a sequence of calls, such as the slots of the rows."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """What the axis names mean."""
    where: tuple[str, ...] = ()
    """Conditions on axis sizes and host values that every call is checked for, in this order, such
    as "S >= W - 1". One that names an absent optional argument's axis holds."""

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(n for n, a in self.args.items() if isinstance(a, Arg) and a.written)

    def read_before_wait(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Arguments that this call reads before it waits for the previous launch, each with the
        argument that asked for it, or an empty name where every call does."""
        return {
            name: hazard.when
            for hazard in self.hazards
            if hazard.kind == "early_read" and (not hazard.when or arguments[hazard.when])
            for name in hazard.args
        }

    def tolerance_of(self, name: str) -> Tolerance:
        if isinstance(self.tolerance, Tolerance):
            return self.tolerance
        return self.tolerance[name]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Axis sizes of a call from metadata alone; raises ContractError for what does not fit."""
        sizes: dict[str, int] = {}
        pending: list[tuple[str, str, int]] = []
        for name, spec in self.args.items():
            value = arguments.get(name)
            if isinstance(spec, Value):
                _check_value(name, spec, value)
            elif value is None:
                if not spec.optional:
                    raise ContractError(f"{name}: missing; pass a tensor [{spec.shape}]")
            else:
                _check_tensor(name, spec, value, sizes, pending)
        names = ChainMap(sizes, arguments)  # type: ignore[arg-type]
        for name, expression, actual in pending:
            _solve(expression, actual, sizes)
            expected = _evaluate(expression, names)
            if expected is not None and expected != actual:
                raise ContractError(
                    f"{name}: axis {expression} is {actual}, expected {expected} "
                    f"from {_describe(expression, names)}"
                )
        for condition in self.where:
            if _evaluate(condition, names) == 0:
                raise ContractError(f"needs {condition}; got {_describe(condition, names)}")
        return sizes

    def shape_only(self, arguments: Mapping[str, Any]) -> Any:
        """Empty results of a call on the device of its arguments: the op without its arithmetic."""
        sizes = self.bind(arguments)
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        results = []
        for name, spec in self.returns.items():
            shape = [_evaluate(axis, {**sizes, **_host_axes(arguments)}) for axis in spec.axes]
            if None in shape:
                raise ContractError(f"{name}: [{spec.shape}] does not follow from the arguments")
            dtype = _result_dtype(spec, self.args, arguments)
            results.append(torch.empty(shape, dtype=dtype, device=tensors[0].device))  # type: ignore[arg-type]
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def cost_of(self, arguments: Mapping[str, Any]) -> Cost:
        """Bytes and flops of a call, from metadata alone."""
        sizes = {**self.bind(arguments), **_host_axes(arguments)}
        sizes["act"] = _activation(self.args, arguments).itemsize
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                sizes[f"{name}_bytes"] = value.nbytes
        return self.cost(sizes)


def _check_value(name: str, spec: Value, value: Any) -> None:
    if not isinstance(value, spec.type):
        kinds = spec.type if isinstance(spec.type, tuple) else (spec.type,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ContractError(f"{name}: {value!r} is a {type(value).__name__}, expected {wanted}")


def _check_tensor(
    name: str, spec: Arg, value: Any, sizes: dict[str, int], pending: list[tuple[str, str, int]]
) -> None:
    if not isinstance(value, torch.Tensor):
        raise ContractError(f"{name}: expected a tensor [{spec.shape}], got {type(value).__name__}")
    axes = spec.axes_as(_check_dtype(name, spec, value, sizes))
    if value.dim() != len(axes):
        raise ContractError(f"{name}: shape {tuple(value.shape)} is not [{spec.shape}]")
    strided = spec.layout == "contiguous" and not value.is_contiguous()
    if strided or (spec.layout == "rows" and value.dim() and value.stride(-1) != 1):
        raise ContractError(f"{name}: must be {spec.layout}; strides are {value.stride()}")
    for axis, actual in zip(axes, value.shape, strict=True):
        if axis.isdigit() or not _PLAIN_AXIS.match(axis):
            pending.append((name, axis, actual))
        elif sizes.setdefault(axis, actual) != actual:
            raise ContractError(f"{name}: axis {axis} is {actual}, expected {sizes[axis]}")


def _check_dtype(name: str, spec: Arg, value: torch.Tensor, sizes: dict[str, int]) -> str:
    """The alternative of `spec.dtype` that `value` has."""
    for choice in spec.dtype.split("|"):
        if choice == "act":
            if value.dtype not in ACTIVATIONS:
                continue
            code = ACTIVATIONS.index(value.dtype)
            if sizes.setdefault("_act", code) == code:
                return choice
        elif value.dtype == DTYPES[choice] or (
            choice == "f32" and value.dtype == torch.float64  # the reference runs in fp64
        ):
            return choice
    act = f" (act is {ACTIVATIONS[sizes['_act']]})" if "_act" in sizes else ""
    raise ContractError(f"{name}: dtype {value.dtype} is not {spec.dtype}{act}")


def _evaluate(expression: str, names: Mapping[str, Any]) -> int | None:
    """The value of an axis expression or condition; None where a name is unbound. Expressions are
    source code of a contract, never input."""
    if expression.isdigit():
        return int(expression)
    try:
        return int(eval(_compiled(expression), {"__builtins__": {}, "len": len}, dict(names)))
    except NameError:
        return None


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, f"<{expression}>", "eval")


def _solve(axis: str, actual: int, sizes: dict[str, int]) -> None:
    """Binds the unknown name of an axis 2*I or L//32 to the size that would make it `actual`."""
    if match := _MULTIPLE.match(axis):
        sizes.setdefault(match[2], actual // int(match[1]))
    elif match := _QUOTIENT.match(axis):
        sizes.setdefault(match[1], actual * int(match[2]))


def _host_axes(arguments: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _activation(args: Mapping[str, Arg | Value], arguments: Mapping[str, Any]) -> torch.dtype:
    for name, spec in args.items():
        value = arguments.get(name)
        if isinstance(spec, Arg) and spec.dtype == "act" and isinstance(value, torch.Tensor):
            return value.dtype
    return torch.float32


def _result_dtype(
    spec: Arg, args: Mapping[str, Arg | Value], arguments: Mapping[str, Any]
) -> torch.dtype:
    return _activation(args, arguments) if spec.dtype == "act" else DTYPES[spec.dtype]


def _describe(expression: str, names: Mapping[str, Any]) -> str:
    """The host values that `expression` names."""
    used = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", expression))
    values = {name: names[name] for name in used if name in names}
    return ", ".join(
        f"{name}={value}" for name, value in values.items() if not isinstance(value, torch.Tensor)
    )
