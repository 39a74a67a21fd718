"""A checkpoint against its exact conversions: the same texts, greedily, in fp32.

Each of NVFP4 and bf16 is made by `tercel checkpoint convert` in a temporary directory.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import counting_bar
from tercel.config import SamplingParams
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.llm import LLM
from tercel.runtime.tokenizer import Tokenizer
from tercel.weights.convert import convert_checkpoint

FORMATS = ("nvfp4", "bf16")


def main(
    model: Model = NANO,
    problems: Annotated[int, typer.Option(min=1, help="Word problems to answer.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    as_json: Json = False,
) -> None:
    """Compare the texts of a checkpoint with those of its exact conversions."""
    prompts = prompts_of(model, problems)
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory(prefix="tercel-convert-") as directory,
        counting_bar("Checkpoints") as report,
    ):
        wanted = texts(model, prompts, max_tokens)
        for done, to in enumerate(FORMATS, start=1):
            report(done, len(FORMATS) + 1)
            out = Path(directory) / to
            conversion = convert_checkpoint(model, out, to)
            changed = sum(each.inexact_values for each in conversion.exactness)
            same = sum(a == b for a, b in zip(texts(out, prompts, max_tokens), wanted, strict=True))
            figures += [
                Figure(f"{to}: weights changed", changed, "=", 0, ",d"),
                Figure(f"{to}: equal texts", same, "=", problems, ",d"),
            ]
    settings = {"problems": problems, "max_tokens": max_tokens}
    publish(
        Report(
            "Texts of converted checkpoints against the original's, fp32", tuple(figures), settings
        ),
        as_json,
    )


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
    typer.run(main)
