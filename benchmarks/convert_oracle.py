"""Whether mlx-lm agrees on a checkpoint and on what `tercel checkpoint convert` makes of it.

    python benchmarks/convert_oracle.py --mlx-python PATH [--model DIR] [--json]

Converts to bf16, and to NVFP4 and back to MXFP4; mlx-lm loads each result and the original with its
own loader and computes the logits of random prompts in fp32. Exits with 1 where one argmax differs.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from tercel.core.model import ModelConfig
from tercel.weights.convert import convert_checkpoint

WORKER = Path(__file__).with_name("mlx_logits.py")
VECTOR = Path(__file__).parents[1] / "tests/vectors/kimi_k3"
ROUTES = {"bf16": ("bf16",), "NVFP4, back to MXFP4": ("nvfp4", "mxfp4")}
"""What is compared with the original -> the conversions in a row."""


def main(
    mlx_python: Annotated[Path, typer.Option(help="Python of an environment with mlx-lm.")],
    model: Annotated[Path, typer.Option(help="MXFP4 checkpoint.")] = VECTOR,
    prompts: Annotated[int, typer.Option(min=1, help="Random prompts.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare mlx-lm's logits of a checkpoint and of its conversions."""
    vocabulary = ModelConfig.load(model).vocab_size
    choose = random.Random(0)
    tokens = [[choose.randrange(vocabulary) for _ in range(length)] for _ in range(prompts)]
    with tempfile.TemporaryDirectory(prefix="tercel-convert-") as directory:
        base = Path(directory)
        (base / "prompts.json").write_text(json.dumps(tokens))
        original = logits(mlx_python, model, base)
        results = {}
        for name, steps in ROUTES.items():
            converted, source = base / steps[-1], model
            for step in steps:
                convert_checkpoint(source, base / step, step)
                source = base / step
            results[name] = compare(logits(mlx_python, converted, base), original)
    if as_json:
        typer.echo(json.dumps({"model": str(model), "positions": prompts * length, **results}))
    else:
        show(results, prompts * length)
    raise typer.Exit(0 if all(each["argmax_equal"] == 1 for each in results.values()) else 1)


def logits(python: Path, model: Path, base: Path) -> np.ndarray:
    """[prompts, length, vocabulary] fp32 by mlx-lm."""
    out = base / "logits.npy"
    subprocess.run([python, WORKER, model, base / "prompts.json", out], check=True)
    loaded: np.ndarray = np.load(out)
    return loaded


def compare(actual: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    difference = np.abs(actual - wanted).max()
    return {
        "argmax_equal": float((actual.argmax(-1) == wanted.argmax(-1)).mean()),
        "max_difference": float(difference / np.abs(wanted).max()),
    }


def show(results: dict[str, dict[str, Any]], positions: int) -> None:
    table = Table(
        "converted to", "same argmax", "largest difference", title=f"{positions} positions"
    )
    for name, each in results.items():
        table.add_row(
            name, f"{each['argmax_equal']:.2%}", f"{each['max_difference']:.1e} of the largest"
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(typer.run(main))
