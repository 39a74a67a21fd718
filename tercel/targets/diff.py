"""What two programs do differently, site by site."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tercel.core.step import StepClass
from tercel.targets.recording import Call


@dataclass(frozen=True)
class Difference:
    """A kind of call that one program makes more often than the other."""

    step_class: StepClass
    site: str
    call: str
    """Op, implementation and tensor shapes."""
    before: int
    after: int


def describe(call: Call) -> str:
    shapes = " ".join(f"{name}{list(shape)}{dtype}" for name, shape, dtype in call.shapes)
    return f"{call.op}[{call.implementation}] {shapes}"


def diff(
    before: Mapping[StepClass, Iterable[Call]], after: Mapping[StepClass, Iterable[Call]]
) -> list[Difference]:
    """The kinds of calls whose number differs, in the order in which they are first made."""
    found = []
    for step_class in StepClass:
        first, second = (
            Counter((call.site, describe(call)) for call in program.get(step_class, ()))
            for program in (before, after)
        )
        for site, text in dict.fromkeys([*first, *second]):
            counts = first[site, text], second[site, text]
            if counts[0] != counts[1]:
                found.append(Difference(step_class, site, text, *counts))
    return found
