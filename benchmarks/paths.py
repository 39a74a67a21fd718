"""Where things lie in a checkout."""

from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
NANO = ROOT / "checkpoints/nano"

Model = Annotated[Path, typer.Option(help="Checkpoint directory.")]
