"""The recipe run on meta tensors: the ordered list of ops that a rank runs for a kind of step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tercel.blocks.sites import SiteTable, table
from tercel.contract.op import PLAIN, Deferred
from tercel.core.rank import Rank
from tercel.core.step import StepClass
from tercel.errors import ContractError
from tercel.targets.binding import Binding, Bound
from tercel.targets.launch_order import LaunchOrder


@dataclass(frozen=True)
class Call:
    """One op, or one exchange between ranks, of a program."""

    site: str
    op: str
    implementation: str
    status: str
    shapes: tuple[tuple[str, tuple[int, ...], str], ...]
    """(argument, shape, dtype) of this rank's tensors."""
    bytes: int
    flops: int
    given: tuple[str, ...] = ()
    """What the program adds to the arguments, as name=value."""


class Refused(ContractError):
    """A bound implementation does not serve the sizes that its site has."""

    def __init__(self, bound: Bound, reason: str) -> None:
        name = bound.implementation.name
        super().__init__(f"{bound.site}: {bound.op.name}: {name} refuses: {reason}")
        self.key = (bound.site, bound.op.name, name)
        self.reason = reason


class Recorder:
    """A site table that checks and notes every call and computes nothing."""

    def __init__(self, bound: dict[str, Bound]) -> None:
        self.calls: list[Call] = []
        self.table: SiteTable = table({site: self._site(item) for site, item in bound.items()})
        self.order = LaunchOrder()

    def _site(self, bound: Bound) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments, results, cost = bound.op.record(*args, **kwargs, **bound.given)
            refusal = bound.implementation.admits(bound.op.contract.bind(arguments))
            if refusal is not None:
                raise Refused(bound, refusal)
            self._launch(bound, arguments, results)
            self.calls.append(
                Call(
                    bound.site,
                    bound.op.name,
                    bound.implementation.name,
                    bound.status.value,
                    _shapes(arguments),
                    cost.bytes,
                    cost.flops,
                    tuple(f"{name}={value}" for name, value in bound.given.items()),
                )
            )
            return results

        return call

    def exchange(self, name: str, x: torch.Tensor, *results: torch.Tensor) -> None:
        shapes = (("x", tuple(x.shape), _dtype(x)),)
        self.calls.append(Call("exchange", name, "group", "", shapes, 2 * x.nbytes, 0))
        self.order.launched(name, (x, *results), triggers_early=False)

    def _launch(self, bound: Bound, arguments: dict[str, Any], results: Any) -> None:
        """Refuses the call where it would read before its wait what need not be written then."""
        contract = bound.op.contract
        if bound.implementation.name not in PLAIN:  # torch's launches read nothing before they wait
            self.order.check(bound.site, arguments, contract.read_before_wait(arguments))
        made = results if isinstance(results, tuple) else (results,)
        written = (*(arguments[name] for name in contract.written), *made)
        triggers_early = bound.implementation.triggers_early
        self.order.launched(bound.op.name, written, triggers_early=triggers_early)


class RecordingGroup:
    """Notes exchanges and returns tensors of the right shape."""

    def __init__(self, rank: int, world_size: int, recorder: Recorder) -> None:
        self.rank = rank
        self.world_size = world_size
        self._recorder = recorder

    @classmethod
    def of(cls, place: Rank, recorder: Recorder) -> "RecordingGroup":
        """The world of `place`."""
        return cls(place.rank, place.layout.world_size, recorder)

    def _note(self, name: str, x: torch.Tensor, *results: torch.Tensor) -> None:
        if self.world_size > 1:
            self._recorder.exchange(name, x, *results)

    def all_reduce(self, *parts: torch.Tensor) -> torch.Tensor:
        result = parts[0] if self.world_size == 1 else torch.empty_like(parts[0])
        for x in parts:
            self._note("all_reduce", x, result)
        return result

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        result = torch.cat([x] * self.world_size, dim=dim)
        self._note("all_gather", x, result)
        return result

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        result = x.chunk(self.world_size, dim=dim)[self.rank].contiguous()
        self._note("reduce_scatter", x, result)
        return result

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._note("all_to_all", chunks[0])
        return list(chunks)

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._note("send", x)

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        result = torch.empty_like(like)
        self._note("recv", like, result)
        return result

    def vote(self, agree: bool) -> bool:
        return agree

    def split(self, size: int) -> "RecordingGroup":
        return RecordingGroup(self.rank % size, size, self._recorder)


def running_table(binding: Binding, step_class: StepClass) -> SiteTable:
    """The bound implementations themselves on meta tensors: any that reads a tensor on the host
    raises, which is how decode steps are proven free of it."""

    def checked(bound: Bound) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _, expected, _ = bound.op.record(*args, **kwargs, **bound.given)
            if isinstance(bound.implementation.run, Deferred):
                return expected  # a launch needs memory; its capture into a graph proves the same
            actual = bound.implementation.run(*args, **kwargs, **bound.given)
            if _result_shapes(actual) != _result_shapes(expected):
                raise ContractError(
                    f"{bound.op.name}: {bound.implementation.name} returns "
                    f"{_result_shapes(actual)}, its contract says {_result_shapes(expected)}"
                )
            return actual

        return call

    return table({site: checked(bound) for site, bound in binding[step_class].items()})


def _result_shapes(results: Any) -> list[tuple[tuple[int, ...], str]]:
    values = results if isinstance(results, tuple) else (results,)
    return [(tuple(x.shape), _dtype(x)) for x in values if isinstance(x, torch.Tensor)]


def _shapes(arguments: dict[str, Any]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple(
        (name, tuple(value.shape), _dtype(value))
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    )


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
