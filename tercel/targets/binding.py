"""Which implementation stands behind each site, chosen once, with the reason."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

import torch

from tercel.blocks.sites import WEIGHTS, Sites, SiteTable, sites, table
from tercel.contract import PLAIN, Implementation, Op
from tercel.contract.receipt import Status, status
from tercel.core.arch import Arch
from tercel.core.step import StepClass
from tercel.errors import ConfigError
from tercel.ops.sampling.logprobs import logprobs
from tercel.ops.sampling.penalize import penalize
from tercel.ops.sampling.sample import sample
from tercel.ops.spec.accept import accept
from tercel.targets.table import TargetRow

SAMPLING: Sites = {
    "sample": sample,
    "accept": accept,
    "penalize": penalize,
    "logprobs": logprobs,
}
"""Not sites of a recipe, since they run on gathered logits."""


@dataclass(frozen=True)
class Bound:
    """One site of one step class."""

    site: str
    op: Op[..., Any]
    implementation: Implementation
    status: Status
    reason: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the program adds to every call of the site: early reads of what is old."""


Binding = Mapping[StepClass, Mapping[str, Bound]]


Refusals = Mapping[tuple[str, str, str], str]
"""(site, op, implementation) to why it does not serve the sizes that the site has."""

Late = Collection[tuple[str, str]]
"""(site, argument) of early reads that the order of launches forbids."""


def bind(
    row: TargetRow,
    arch: Arch,
    *,
    ordered: bool = False,
    refused: Refusals | None = None,
    late: Late = (),
) -> dict[StepClass, dict[str, Bound]]:
    """Every site of every step class; `ordered` takes the plain implementations whose bits do not
    depend on the layout. What is `refused` is passed over. Kernels read early what they may read
    early when asked, unless that is `late`.

    Raises:
        ConfigError: a row names what there is not, or wants kernels together with `ordered`.
    """
    if ordered and row.policy != "portable":
        raise ConfigError("sum_layout: only plain implementations keep one order; set mode=off")

    def choose(site: str, op: Op[..., Any]) -> Bound:
        return _ordered(site, op, arch) if ordered else _choose(row, site, op, arch, refused or {})

    binding = {
        step_class: {site: choose(site, op) for site, op in sites(step_class).items()}
        for step_class in StepClass
    }
    if row.policy != "named":
        _agree_on_forms(binding, arch)
    return {
        step_class: {site: _reading_early(item, late) for site, item in bound.items()}
        for step_class, bound in binding.items()
    }


def _reading_early(bound: Bound, late: Late) -> Bound:
    if bound.implementation.name in PLAIN:
        return bound
    asked = (hazard.when for hazard in bound.op.contract.hazards if hazard.kind == "early_read")
    given = {name: True for name in asked if name and (bound.site, name) not in late}
    return replace(bound, given=given)


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


def bind_sites(
    row: TargetRow,
    arch: Arch,
    wanted: Sites,
    *,
    ordered: bool = False,
    refused: Refusals | None = None,
) -> dict[str, Bound]:
    """Sites of a drafter or a sampler, for which rows name no implementations: those of `portable`
    rows are portable, those of all others the best certified ones; `ordered` and `refused` as of
    bind."""
    policy = "portable" if ordered else row.policy
    policy = policy if policy == "portable" else "best"
    chosen = replace(row, policy=policy)
    return {site: _choose(chosen, site, op, arch, refused or {}) for site, op in wanted.items()}


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
    return table({site: counted(prefix + site, item, counts) for site, item in bound.items()})


def counted(name: str, bound: Bound, counts: Counter[str]) -> Callable[..., Any]:
    """The implementation; each call adds to `counts`, under its site's `name`."""
    run, key = bound.implementation.run, f"{name}:{bound.op.name}:{bound.implementation.name}"
    given = bound.given

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return run(*args, **kwargs, **given)

    return call


def _choose(row: TargetRow, site: str, op: Op[..., Any], arch: Arch, refused: Refusals) -> Bound:
    if row.policy == "portable":
        return _bound(site, op, op.portable, arch, "portable target")
    if row.policy == "named":
        name = row.implementations.get(site)
        if name is None:
            raise ConfigError(f"target {row.name}: site {site} has no implementation")
        return _bound(site, op, op.implementation(name), arch, "named by the target")
    return _best(site, op, arch, refused)


def _best(site: str, op: Op[..., Any], arch: Arch, refused: Refusals) -> Bound:
    """The first kernel that is certified on `arch` and serves the site; merely compiled ones are
    never taken."""
    passed_over = []
    for name, implementation in op.implementations.items():
        if name in PLAIN or arch not in implementation.archs:
            continue
        held = status(op, name, arch)
        refusal = refused.get((site, op.name, name))
        if held == Status.CERTIFIED and refusal is None:
            return _bound(site, op, implementation, arch, f"certified on {arch}")
        passed_over.append(f"{name}: {refusal or held}")
    why = "; ".join(passed_over) or "there is no kernel"
    return _bound(site, op, op.portable, arch, f"nothing else serves on {arch} ({why})")


def _ordered(site: str, op: Op[..., Any], arch: Arch) -> Bound:
    implementation = op.implementations.get("ordered", op.portable)
    return _bound(site, op, implementation, arch, "bits that do not depend on the layout")


def _bound(
    site: str, op: Op[..., Any], implementation: Implementation, arch: Arch, reason: str
) -> Bound:
    return Bound(site, op, implementation, status(op, implementation.name, arch), reason)
