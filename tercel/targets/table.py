"""The rows: what this package can run, as data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tercel.core.arch import Arch
from tercel.core.step import TokenLimits

Policy = Literal["portable", "best", "named"]
Speculation = Literal["none", "dspark"]


@dataclass(frozen=True)
class TargetRow:
    """One deployment: which implementation serves each site of which recipe."""

    checkpoint: str
    """`any` for the rows that serve every checkpoint."""
    arch: str
    layout: str
    recipe: str = "kimi"
    """Module under tercel.targets.recipes."""
    policy: Policy = "best"
    """portable: plain torch everywhere; best: the best certified implementation per site, chosen
    at load; named: `implementations` says it and a missing one is an error."""
    implementations: Mapping[str, str] = field(default_factory=dict)
    """Site to implementation, for named rows."""
    limits: TokenLimits = field(default_factory=TokenLimits)
    speculation: frozenset[Speculation] = frozenset({"none"})
    drafter: str = "block"
    """Module under tercel.targets.drafters whose `create` makes the drafter of a speculating
    engine."""
    kv_dtypes: frozenset[str] = frozenset({"auto"})
    in_auto: bool = True
    """Whether `auto` may choose this row."""

    @property
    def name(self) -> str:
        return f"{self.checkpoint}__{self.arch}__{self.layout}"


ANY_PAGES = frozenset({"auto", "float8"})


def portable(layout: str) -> TargetRow:
    """Every site on its plain torch implementation: what `off` means and accuracy is measured
    against."""
    return TargetRow("any", "any", layout, policy="portable", kv_dtypes=ANY_PAGES)


def generic(layout: str) -> TargetRow:
    """The best certified implementation per site: what `auto` falls to without a named target."""
    return TargetRow("any", "any", layout, kv_dtypes=ANY_PAGES)


def _k3_mxfp4() -> Iterable[TargetRow]:
    """Sixteen ranks with experts split four by four serve with a drafter, sixteen by one without;
    two nodes of eight H200 hold the model as two stages. On sm_103 the rows are compiled only."""
    for arch in (Arch.SM_90, Arch.SM_100, Arch.SM_103):
        certified_here = arch is not Arch.SM_103
        yield TargetRow(
            "kimi_k3_mxfp4",
            arch,
            "tp16_moetp4ep4",
            speculation=frozenset({"none", "dspark"}),
            in_auto=certified_here,
        )
        yield TargetRow("kimi_k3_mxfp4", arch, "tp16_moetp16ep1", in_auto=certified_here)
    yield TargetRow("kimi_k3_mxfp4", Arch.SM_90, "tp8_pp2")


def _k3_nvfp4() -> Iterable[TargetRow]:
    """A context server that shares its experts with fifteen others, and three kinds of generation
    server. The sm_90 rows run the same code and are kept out of auto."""
    for arch in (Arch.SM_107, Arch.SM_90):
        for layout in ("tp1_dwdp16", "helix8", "helix16_moetp4ep4", "dep16"):
            yield TargetRow(
                "kimi_k3_nvfp4",
                arch,
                layout,
                speculation=frozenset({"none", "dspark"}),
                kv_dtypes=frozenset({"float8", "nvfp4"}),
                in_auto=arch is Arch.SM_107,
            )


def _kimi_linear() -> Iterable[TargetRow]:
    for layout in ("tp1", "tp2"):
        yield TargetRow("kimi_linear_bf16", Arch.SM_90, layout)


NAMED: tuple[TargetRow, ...] = (*_k3_mxfp4(), *_k3_nvfp4(), *_kimi_linear())
"""Targets with an identity of their own; routing finds them by (checkpoint, arch, layout)."""
