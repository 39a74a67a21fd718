"""What certifies an op: cells, sequences, replays, refusals, untouched memory, controls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tercel.contract.compare import Error, compare
from tercel.contract.contract import Cell, Contract
from tercel.contract.draw import draw
from tercel.contract.op import Implementation, Op
from tercel.errors import CheckFailed, ContractError


@dataclass(frozen=True)
class CellReport:
    """Errors per result and written argument."""

    errors: Mapping[str, Error]

    @property
    def worst(self) -> Error:
        return Error(
            max(error.element_ulps for error in self.errors.values()),
            max(error.rms_ulps for error in self.errors.values()),
        )


def check_cell(
    op: Op[..., Any],
    cell: Cell,
    implementation: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> CellReport:
    """One call against the reference in fp64: results, written arguments, untouched memory."""
    return check_sequence(op, cell, implementation, steps=1, dtype=dtype, device=device, seed=seed)


def check_sequence(
    op: Op[..., Any],
    cell: Cell,
    implementation: str,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> CellReport:
    """`steps` calls that carry the written arguments on, each compared with the reference; what
    the contract keeps, such as the rows' slots, stays as the first step draws it."""
    return _run_sequence(op, cell, op.implementation(implementation), steps, dtype, device, seed)


def check_replay(
    op: Op[..., Any],
    cell: Cell,
    implementation: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Inputs rewritten in place at fixed addresses give the new call's bits. On a GPU the call is
    captured into a CUDA graph and replayed."""
    chosen = op.implementation(implementation)
    run = chosen.run
    first, second = (
        packed(op, chosen, draw(op, cell, dtype=dtype, device=device, seed=seed), dtype)
        for seed in (1, 2)
    )
    expected_arguments = _clone(second)
    expected = _results(op.contract, run(**expected_arguments), expected_arguments)
    replayed = _capture(run, first, device)
    _copy_tensors(second, first)
    actual = _results(op.contract, replayed(), first)
    for name, value in expected.items():
        if not torch.equal(_bits(actual[name]), _bits(value)):
            raise CheckFailed(f"{op.name}: {name} differs when its inputs are rewritten in place")


def check_refusal(
    op: Op[..., Any], cell: Cell, implementation: str, change: Callable[[dict[str, Any]], None]
) -> ContractError:
    """`change` makes the arguments wrong: the op raises before any launch, and the next call,
    with the right arguments, is right."""
    launches = 0
    chosen = op.implementation(implementation)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal launches
        launches += 1
        return chosen.run(*args, **kwargs)

    counted = Implementation("counted", run, admits=chosen.admits)
    probe = Op(op.__wrapped__, op.contract, (*op.implementations.values(), counted))
    arguments = draw(op, cell, dtype=torch.float32)
    wrong = _clone(arguments)
    change(wrong)
    try:
        probe.using("counted")(**wrong)
    except ContractError as error:
        if launches:
            raise CheckFailed(f"{op.name}: launched before it refused: {error}") from error
        check_cell(op, cell, implementation)
        return error
    raise CheckFailed(f"{op.name}: accepted arguments that its contract refuses")


def check_invalid(op: Op[..., Any], cell: Cell, change: Callable[[dict[str, Any]], None]) -> None:
    """`change` gives the arguments values that the op would answer wrongly: `valid` raises."""
    arguments = _clone(draw(op, cell, dtype=torch.float32))
    change(arguments)
    op.contract.bind(arguments)
    try:
        if op.contract.valid is not None:
            op.contract.valid(**arguments)
    except ContractError:
        return
    raise CheckFailed(f"{op.name}: its validity check accepts wrong values")


def check_roundings(
    op: Op[..., Any],
    cell: Cell,
    implementation: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    same: float = 0.98,
) -> None:
    """Rounds where the reference does: in `dtype`, all but a few elements carry its bits. Sums in
    another order cross few rounding boundaries; a rounding more or less moves a fifth."""
    chosen = op.implementation(implementation)
    arguments = draw(op, cell, dtype=dtype)
    refer = _clone(arguments)
    expected = _results(op.contract, op.implementation("reference").run(**refer), refer)
    ours = packed(op, chosen, arguments, dtype)
    actual = _results(op.contract, chosen.run(**ours), ours)
    for name, value in expected.items():
        equal = (actual[name] == value)[~(actual[name].isnan() & value.isnan())]  # poison aside
        share = float(equal.double().mean()) if equal.numel() else 1.0
        if share < same:
            raise CheckFailed(f"{op.name}: {share:.1%} of {name} carry the reference's bits")


def check_meta(op: Op[..., Any], cell: Cell, implementation: str) -> None:
    """Runs on tensors without contents, so it reads none of them on the host, and gives results
    of the contract's shapes and dtypes."""
    chosen = op.implementation(implementation)
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in draw(op, cell, dtype=torch.float32).items()
    }
    expected = _results(op.contract, op.contract.shape_only(arguments), arguments)
    ours = packed(op, chosen, arguments, torch.float32)
    for name, value in _results(op.contract, chosen.run(**ours), ours).items():
        if (value.shape, value.dtype) != (expected[name].shape, expected[name].dtype):
            raise CheckFailed(
                f"{op.name}: {name} is {tuple(value.shape)} {value.dtype}, the contract says "
                f"{tuple(expected[name].shape)} {expected[name].dtype}"
            )


def check_control(
    op: Op[..., Any],
    cell: Cell,
    broken: Callable[..., Any],
    *,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
) -> CheckFailed:
    """A subtly wrong implementation must fail the check that the real ones pass."""
    try:
        _run_sequence(op, cell, Implementation("broken", broken), steps, dtype, "cpu", 0)
    except CheckFailed as error:
        return error
    raise CheckFailed(f"{op.name}: the broken implementation passes; the check is too weak")


def _run_sequence(
    op: Op[..., Any],
    cell: Cell,
    implementation: Implementation,
    steps: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> CellReport:
    contract = op.contract
    errors: dict[str, Error] = {}
    carried: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(steps):
        arguments = draw(op, cell, dtype=dtype, device=device, seed=seed + step)
        if step == 0:
            kept = {name: arguments[name] for name in contract.keep}
        arguments.update(kept)
        expected_arguments = _upcast(arguments)
        for name, (ours, theirs) in carried.items():
            arguments[name], expected_arguments[name] = ours, theirs
        arguments = packed(op, implementation, arguments, dtype)
        before = _clone(arguments)
        refer = op.implementation("reference").run
        expected = _results(contract, refer(**expected_arguments), expected_arguments)
        actual = _results(contract, implementation.run(**arguments), arguments)
        _check_untouched(op, before, arguments)
        for name, value in actual.items():
            label = f"{op.name}[{cell}] step {step} {name}"
            error = compare(label, value, expected[name], contract.tolerance_of(name), dtype)
            previous = errors.get(name, Error(0.0, 0.0))
            errors[name] = Error(
                max(previous.element_ulps, error.element_ulps),
                max(previous.rms_ulps, error.rms_ulps),
                error.element_allowed,
                error.rms_allowed,
            )
        carried = {n: (arguments[n], expected_arguments[n]) for n in contract.written}
    return CellReport(errors)


def packed(
    op: Op[..., Any],
    implementation: Implementation,
    arguments: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """`arguments` with the weights as `implementation` wants them."""
    if implementation.pack is None:
        return arguments
    names = op.contract.weights
    packed = implementation.pack(*(arguments[name] for name in names), dtype=dtype)
    return {**arguments, **dict(zip(names, packed, strict=True))}


def _results(contract: Contract, returned: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = tuple(contract.returns)
    values = () if not names else (returned,) if len(names) == 1 else tuple(returned)
    results = dict(zip(names, values, strict=True))
    results.update(
        {name: arguments[name] for name in contract.written if arguments[name] is not None}
    )
    return results


def _check_untouched(op: Op[..., Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in after.items():
        if name in op.contract.written or not isinstance(value, torch.Tensor):
            continue
        if not torch.equal(_bits(value), _bits(before[name])):
            raise CheckFailed(f"{op.name}: wrote {name}, which its contract does not declare")


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Comparable bits, so that NaN equals itself and -0 differs from 0."""
    return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _upcast(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else _clone_value(value)
        for name, value in arguments.items()
    }


def _clone(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _clone_value(value) for name, value in arguments.items()}


def _clone_value(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copy_tensors(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    for name, value in source.items():
        if isinstance(value, torch.Tensor):
            target[name].copy_(value)


def _capture(run: Callable[..., Any], arguments: dict[str, Any], device: str) -> Callable[[], Any]:
    if torch.device(device).type != "cuda":
        run(**arguments)  # what an implementation keeps per address is now out of date
        return lambda: run(**arguments)
    run(**_clone(arguments))  # first calls compile, which capture forbids
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run(**arguments)

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return returned

    return replay
