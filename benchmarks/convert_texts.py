"""Whether a checkpoint and its exact conversions write the same texts, greedily, in fp32.

    python benchmarks/convert_texts.py [--model DIR] [--problems N] [--max-tokens N] [--json]

Each of NVFP4 and bf16 is made by `tercel checkpoint convert` in a temporary directory. Exits with 1
where a conversion was not exact or a text differs.
"""

import json
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from tercel.config import SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import Tokenizer
from tercel.weights.convert import convert_checkpoint

NANO = Path(__file__).parents[1] / "checkpoints/nano"
FORMATS = ("nvfp4", "bf16")


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")] = NANO,
    problems: Annotated[int, typer.Option(min=1, help="Word problems to answer.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the texts of a checkpoint with those of its exact conversions."""
    prompts = prompts_of(model, problems)
    wanted = texts(model, prompts, max_tokens)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tercel-convert-") as directory:
        for to in FORMATS:
            out = Path(directory) / to
            conversion = convert_checkpoint(model, out, to)
            got = texts(out, prompts, max_tokens)
            results[to] = {
                "inexact_values": sum(each.inexact_values for each in conversion.exactness),
                "same_texts": sum(a == b for a, b in zip(got, wanted, strict=True)),
            }
    if as_json:
        typer.echo(json.dumps({"model": str(model), "problems": problems, **results}))
    else:
        for to, each in results.items():
            same, changed = each["same_texts"], each["inexact_values"]
            typer.echo(f"{to}: {same} of {problems} texts equal, {changed} weights changed")
    right = {"inexact_values": 0, "same_texts": problems}
    raise typer.Exit(0 if all(each == right for each in results.values()) else 1)


def prompts_of(model: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(model)
    return [
        encode(tokenizer, render([{"role": "user", "content": problem.question}]))
        for problem in islice(generate(seed=23), count)
    ]


def texts(model: Path, prompts: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """Token ids of every answer."""
    with LLM(model, dtype="float32", mode="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [tuple(each.token_ids) for each in llm.generate(prompts, params)]


if __name__ == "__main__":
    sys.exit(typer.run(main))
