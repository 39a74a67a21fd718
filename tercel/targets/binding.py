"""Which implementation stands behind each site, chosen once, with the reason."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

import torch

from tercel.blocks.sites import WEIGHTS, Sites, SiteTable, sites, table
from tercel.contract import PLAIN, Implementation, Op
from tercel.contract.receipt import Status, status
from tercel.core.arch import Arch
from tercel.core.step import StepClass
from tercel.errors import ConfigError
from tercel.targets.table import TargetRow


@dataclass(frozen=True)
class Bound:
    """One site of one step class."""

    site: str
    op: Op[..., Any]
    implementation: Implementation
    status: Status
    reason: str


Binding = Mapping[StepClass, Mapping[str, Bound]]


def bind(row: TargetRow, arch: Arch, *, ordered: bool = False) -> dict[StepClass, dict[str, Bound]]:
    """Every site of every step class; `ordered` takes the plain implementations whose bits do not
    depend on the layout.

    Raises:
        ConfigError: a row names what there is not, or wants kernels together with `ordered`.
    """
    if ordered and row.policy != "portable":
        raise ConfigError("sum_layout: only plain implementations keep one order; set mode=off")
    choose = _ordered if ordered else _choose
    binding = {
        step_class: {site: choose(row, site, op, arch) for site, op in sites(step_class).items()}
        for step_class in StepClass
    }
    if row.policy != "named":
        _agree_on_forms(binding, arch)
    return binding


def _agree_on_forms(binding: dict[StepClass, dict[str, Bound]], arch: Arch) -> None:
    """Where step classes would read a site's weights in different packed forms, such as when only
    one of two kernels is certified, all of them take the plain implementation."""
    for site in WEIGHTS:
        bounds = [bound[site] for bound in binding.values()]
        if len({item.implementation.pack for item in bounds}) > 1:
            for step_class, item in zip(binding, bounds, strict=True):
                binding[step_class][site] = _bound(
                    site, item.op, item.op.portable, arch, "other step classes lack its packed form"
                )


def bind_sites(row: TargetRow, arch: Arch, wanted: Sites) -> dict[str, Bound]:
    """Sites of a drafter, for which rows name no implementations: those of `portable` rows are
    portable, those of all others the best certified ones."""
    policy = row.policy if row.policy == "portable" else "best"
    chosen = replace(row, policy=policy)
    return {site: _choose(chosen, site, op, arch) for site, op in wanted.items()}


def packs(binding: Binding, dtype: torch.dtype) -> dict[str, Callable[[Any], Any]]:
    """Weight field to what puts it into the form that the bound implementations read. All step
    classes of a site share one packed form."""
    found: dict[str, Callable[[Any], Any]] = {}
    for site, fields in WEIGHTS.items():
        wanted = {bound[site].implementation.pack for bound in binding.values()}
        if len(wanted) > 1:
            raise ConfigError(
                f"site {site}: two step classes want different packed forms; name "
                "implementations that share one"
            )
        pack = wanted.pop()
        if pack is not None:
            found.update(dict.fromkeys(fields, _of_field(pack, dtype)))
    return found


def _of_field(pack: Callable[..., Any], dtype: torch.dtype) -> Callable[[Any], Any]:
    """A pack takes the tensors of a weight; a field is one tensor or a dataclass of several."""

    def apply(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return pack(value, dtype=dtype)
        names = [item.name for item in fields_of(value)]
        packed = pack(*(getattr(value, name) for name in names), dtype=dtype)
        return replace(value, **dict(zip(names, packed, strict=True)))

    return apply


def counted_table(bound: Mapping[str, Bound], counts: Counter[str], prefix: str = "") -> SiteTable:
    """The callables of one step class; each call adds to `counts`, which proves what ran."""
    return table({site: _counted(prefix + site, item, counts) for site, item in bound.items()})


def _counted(name: str, bound: Bound, counts: Counter[str]) -> Callable[..., Any]:
    run, key = bound.implementation.run, f"{name}:{bound.op.name}:{bound.implementation.name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return run(*args, **kwargs)

    return call


def _choose(row: TargetRow, site: str, op: Op[..., Any], arch: Arch) -> Bound:
    if row.policy == "portable":
        return _bound(site, op, op.portable, arch, "portable target")
    if row.policy == "named":
        name = row.implementations.get(site)
        if name is None:
            raise ConfigError(f"target {row.name}: site {site} has no implementation")
        return _bound(site, op, op.implementation(name), arch, "named by the target")
    for implementation in op.implementations.values():
        if implementation.name in PLAIN:
            continue
        if arch in implementation.archs and status(op, implementation.name, arch) == (
            Status.CERTIFIED
        ):
            return _bound(site, op, implementation, arch, f"certified on {arch}")
    return _bound(site, op, op.portable, arch, f"nothing else is certified on {arch}")


def _ordered(row: TargetRow, site: str, op: Op[..., Any], arch: Arch) -> Bound:
    implementation = op.implementations.get("ordered", op.portable)
    return _bound(site, op, implementation, arch, "bits that do not depend on the layout")


def _bound(
    site: str, op: Op[..., Any], implementation: Implementation, arch: Arch, reason: str
) -> Bound:
    return Bound(site, op, implementation, status(op, implementation.name, arch), reason)
