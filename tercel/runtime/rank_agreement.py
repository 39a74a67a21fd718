"""Compares what the ranks report, and names ranks."""

from collections.abc import Mapping, Sequence

from tercel.errors import ConfigError

Report = Mapping[str, str]
"""What must be equal on all ranks, by name; see tercel.runtime.rank_report."""


def check_agreement(reports: Mapping[int, Report]) -> None:
    """Raises ConfigError that names every field on which ranks differ, and the ranks."""
    fields = list(dict.fromkeys(name for report in reports.values() for name in report))
    problems = []
    for name in fields:
        by_value: dict[str, list[int]] = {}
        for rank, report in sorted(reports.items()):
            by_value.setdefault(report.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            sides = [f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()]
            problems.append(f"  {name}: {'; '.join(sides)}")
    if problems:
        lines = "\n".join(problems)
        raise ConfigError(
            f"the ranks do not agree, and no weights were read:\n{lines}\n"
            "start every rank with the same command, package and checkpoint"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
