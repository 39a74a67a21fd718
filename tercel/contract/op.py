"""Ties a public function, its contract and its implementations together."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

from tercel.contract.contract import Contract, Cost
from tercel.core.arch import Arch
from tercel.errors import ContractError

P = ParamSpec("P")
R = TypeVar("R")

EVERY_ARCH = frozenset(Arch)
PLAIN = ("reference", "portable", "ordered")
"""Implementations in plain torch: no kernels, no receipts."""
GPU_ARCHS = EVERY_ARCH - {Arch.CPU}


class Deferred:
    """A function whose module is imported at the first call: a kernel's language is a package
    that a CPU-only installation lacks."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__name__ = name

    def function(self) -> Callable[..., Any]:
        """The function itself; raises ImportError where the kernel's language is not installed."""
        found: Callable[..., Any] = getattr(importlib.import_module(self.__module__), self.__name__)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function()(*args, **kwargs)


@dataclass(frozen=True)
class Implementation:
    """One way to run an op."""

    name: str
    """reference, portable, triton, ..."""
    run: Callable[..., Any]
    archs: frozenset[Arch] = EVERY_ARCH
    pack: Callable[..., Any] | None = None
    """pack(*weights, dtype=act) -> the arguments named by Contract.weights as it wants them, once
    at load; None: the weights as they are."""
    packed_bytes: Callable[..., int] | None = None
    """Bytes of the packed form from the same arguments on meta tensors."""
    triggers_early: bool = False
    """Whether there are calls whose every launch lets the next one start before it has itself
    waited for the previous one: what older ones write need not be there when the next op starts."""
    admits: Callable[[Mapping[str, int]], str | None] = field(default=lambda sizes: None)
    """Why these axis sizes are not served; None where they are."""


class Op(Generic[P, R]):
    """A certified operation. Calling it checks the contract, then runs `implementation`."""

    def __init__(
        self,
        function: Callable[P, R],
        contract: Contract,
        implementations: tuple[Implementation, ...],
    ) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        self.contract = contract
        self.implementations = {item.name: item for item in implementations}
        if tuple(self.signature.parameters) != tuple(contract.args):
            raise ContractError(
                f"{self.name}: signature {list(self.signature.parameters)} and contract "
                f"{list(contract.args)} name different arguments"
            )

    @property
    def folder(self) -> str:
        """The op's package, e.g. tercel.ops.norm.rms_norm."""
        return self.__module__.rpartition(".")[0]

    @property
    def portable(self) -> Implementation:
        """The plain torch implementation: `portable` where there is one, else the reference."""
        return self.implementations.get("portable") or self.implementations["reference"]

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call's arguments by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.using(self.portable.name)(*args, **kwargs)

    def using(self, implementation: str) -> Callable[P, R]:
        """The checked op on a named implementation; refuses before anything is launched."""
        chosen = self.implementation(implementation)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            sizes = self.contract.bind(self.arguments(*args, **kwargs))
            refusal = chosen.admits(sizes)
            if refusal is not None:
                raise ContractError(f"{self.name}: {chosen.name} refuses: {refusal}")
            return chosen.run(*args, **kwargs)  # type: ignore[no-any-return]

        return call

    def implementation(self, name: str) -> Implementation:
        if name not in self.implementations:
            known = ", ".join(self.implementations)
            raise ContractError(f"{self.name}: no implementation {name!r}; there is {known}")
        return self.implementations[name]

    def record(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any, Cost]:
        """The checked call without its arithmetic: (arguments, empty results, cost)."""
        arguments = self.arguments(*args, **kwargs)
        return arguments, self.contract.shape_only(arguments), self.contract.cost_of(arguments)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def operation(
    contract: Contract, *implementations: Implementation
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes a documented signature the public function of an op; its body is only a docstring."""

    def decorate(function: Callable[P, R]) -> Op[P, R]:
        return Op(function, contract, implementations)

    return decorate


def reference(run: Callable[..., Any]) -> Implementation:
    """The naive, dtype-parametric form: the accurate side of every test."""
    return Implementation("reference", run)


def portable(run: Callable[..., Any], **options: Any) -> Implementation:
    """A faster form in plain torch, certified against the reference like any other."""
    return Implementation("portable", run, **options)


def ordered(run: Callable[..., Any], **options: Any) -> Implementation:
    """A slower form in plain torch whose results, bit for bit, do not depend on how ranks divide
    heads or columns; see docs/numerics.md."""
    return Implementation("ordered", run, **options)


def kernel(language: str, function: Callable[..., Any], **options: Any) -> Implementation:
    """The kernel of `function`'s op folder in `language`: the same name in kernel_<language>. It
    triggers early, as a stream of weights wants, unless `options` say otherwise;
    tests/rules/test_launches.py reads in the kernels which is true."""
    folder = function.__module__.rpartition(".")[0]
    run = Deferred(f"{folder}.kernel_{language}", function.__name__)
    return Implementation(language, run, **{"archs": GPU_ARCHS, "triggers_early": True, **options})
