"""mlx-lm on a checkpoint and on what `tercel checkpoint convert` makes of it: do they agree?

Converts to bf16, and to NVFP4 and back to MXFP4; mlx-lm loads each result and the original with its
own loader and computes the logits of random prompts in fp32.
"""

import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.core.model import ModelConfig
from tercel.weights.convert import convert_checkpoint

WORKER = Path(__file__).with_name("mlx_logits.py")
ROUTES = {"bf16": ("bf16",), "NVFP4, back to MXFP4": ("nvfp4", "mxfp4")}
"""What is compared with the original -> the conversions in a row."""


def main(
    model: Model = NANO,
    mlx_python: Annotated[Path | None, typer.Option(help="Python that has mlx-lm.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Random prompts.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 48,
    as_json: Json = False,
) -> None:
    """Compare mlx-lm's logits of an MXFP4 checkpoint and of its conversions."""
    vocabulary = ModelConfig.load(model).vocab_size
    choose = random.Random(0)
    tokens = [[choose.randrange(vocabulary) for _ in range(length)] for _ in range(prompts)]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="tercel-convert-") as directory:
        base = Path(directory)
        (base / "prompts.json").write_text(json.dumps(tokens))
        original = logits(mlx_python, model, base)
        for name, steps in ROUTES.items():
            source = model
            for step in steps:
                convert_checkpoint(source, base / step, step)
                source = base / step
            figures += compare(name, logits(mlx_python, source, base), original)
    settings = {"positions": prompts * length}
    publish(Report("mlx-lm on converted checkpoints, fp32", tuple(figures), settings), as_json)


def logits(python: Path | None, model: Path, base: Path) -> np.ndarray | None:
    """[prompts, length, vocabulary] fp32 by mlx-lm; None where there is none."""
    if python is None:
        return None
    out = base / "logits.npy"
    subprocess.run([python, WORKER, model, base / "prompts.json", out], check=True)
    loaded: np.ndarray = np.load(out)
    return loaded


def compare(name: str, actual: np.ndarray | None, wanted: np.ndarray | None) -> list[Figure]:
    """Argmax of every position, and the largest difference over the largest logit."""
    equal = difference = None
    if actual is not None and wanted is not None:
        equal = float((actual.argmax(-1) == wanted.argmax(-1)).mean())
        difference = float(np.abs(actual - wanted).max() / np.abs(wanted).max())
    return [
        Figure(f"{name}: equal argmax", equal, "=", 1, ".2%"),
        Figure(f"{name}: largest difference", difference, form=".1e"),
    ]


if __name__ == "__main__":
    typer.run(main)
