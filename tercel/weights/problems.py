"""What is wrong with a checkpoint: collected line by line, raised as one error."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tercel.errors import CheckpointError

_LISTED = 20


@dataclass(frozen=True, slots=True)
class Problem:
    file: str
    """The file that has to change; the directory where no single file does."""
    key: str | None
    """The tensor; None: the file as a whole."""
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.text) if part)


def raise_problems(model_dir: Path, problems: Sequence[Problem], hint: str = "") -> None:
    """Raises one CheckpointError that lists all problems; does nothing where there are none."""
    if not problems:
        return
    lines = [f"  {problem}" for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"  ... and {len(problems) - _LISTED} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    text = "\n".join([f"{model_dir} cannot be loaded, {count}:", *lines, *([hint] if hint else [])])
    raise CheckpointError(text)
