"""The rows: what this package can run, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tercel.core.step import TokenLimits

Policy = Literal["portable", "best", "named"]


@dataclass(frozen=True)
class TargetRow:
    """One deployment: which implementation serves each site of which recipe."""

    checkpoint: str
    """`any` for the rows that serve every checkpoint."""
    arch: str
    layout: str
    recipe: str
    """Module under tercel.targets.recipes."""
    policy: Policy
    """portable: plain torch everywhere; best: the best certified implementation per site, chosen
    at load; named: `implementations` says it and a missing one is an error."""
    implementations: Mapping[str, str] = field(default_factory=dict)
    """Site to implementation, for named rows."""
    limits: TokenLimits = field(default_factory=TokenLimits)
    in_auto: bool = True
    """Whether `auto` may choose this row."""

    @property
    def name(self) -> str:
        return f"{self.checkpoint}__{self.arch}__{self.layout}"


def portable(layout: str) -> TargetRow:
    """Every site on its plain torch implementation: what `off` means and accuracy is measured
    against."""
    return TargetRow("any", "any", layout, recipe="kimi", policy="portable")


def generic(layout: str) -> TargetRow:
    """The best certified implementation per site: what `auto` falls to without a named target."""
    return TargetRow("any", "any", layout, recipe="kimi", policy="best")


NAMED: tuple[TargetRow, ...] = ()
"""Targets with an identity of their own; routing finds them by (checkpoint, arch, layout)."""
