"""A drafter on a CPU: how many guesses are accepted, and that they change no text, in fp32.

The acceptance gate's problems are answered with the drafter and without. Rule match draws as plain
decoding does, so that texts are equal at every temperature.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import counting_bar
from tercel.config import SamplingParams
from tercel.gates.acceptance import Acceptance, AcceptanceGate
from tercel.runtime.llm import LLM

DRAFTER = NANO.parent / "nano-dspark"
GOALS: dict[float, tuple[float, float | None]] = {0.0: (5.0, 0.90), 1.0: (4.2, None)}
"""Acceptance length, and the share of first guesses that are accepted, by temperature."""

Texts = Sequence[tuple[int, ...]]


def main(
    model: Model = NANO,
    drafter: Annotated[Path, typer.Option(help="Its directory.")] = DRAFTER,
    problems: Annotated[int, typer.Option(min=1)] = 200,
    as_json: Json = False,
) -> None:
    """Measure a drafter's acceptance, and compare the texts with those of plain decoding."""
    gate = AcceptanceGate(problems=problems, temperatures=tuple(GOALS))
    options: dict[str, Any] = {"dtype": "float32", "max_running": gate.batch, "num_threads": 1}
    with counting_bar("Answers") as report:
        steps = 2 * problems * len(gate.temperatures)
        with LLM(model, drafter=str(drafter), acceptance="match", **options) as llm:
            measured = gate.run(llm, lambda done, _: report(done, steps))
        with LLM(model, **options) as llm:
            plain = plain_texts(llm, gate, lambda done: report(done + steps // 2, steps))
    figures = [
        figure
        for each, texts in zip(measured, plain, strict=True)
        for figure in figures_of(each, texts)
    ]
    settings = {"problems": problems, "requests together": gate.batch, "rule": "match"}
    publish(
        Report("A drafter's guesses against plain decoding, fp32", tuple(figures), settings),
        as_json,
    )


def plain_texts(llm: LLM, gate: AcceptanceGate, report: Callable[[int], None]) -> list[Texts]:
    """Per temperature, what the gate's problems are answered without a drafter."""
    prompts = gate.prompts(llm.tokenizer)
    texts: list[Texts] = []
    for temperature in gate.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=gate.max_tokens, seed=gate.seed)
        texts.append([tuple(each.token_ids) for each in llm.generate(prompts, params)])
        report(len(prompts) * len(texts))
    return texts


def figures_of(measured: Acceptance, plain: Texts) -> list[Figure]:
    """Of one temperature."""
    temperature, rounds = measured.temperature, measured.rounds
    name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    length, first = GOALS[temperature]
    same = sum(tuple(a) == b for a, b in zip(measured.texts, plain, strict=True))
    return [
        Figure(f"{name}: acceptance length", rounds.acceptance_length, ">=", length, ".3f"),
        Figure(f"{name}: first guesses accepted", rounds.per_position[0], ">=", first, ".3f"),
        Figure(f"{name}: texts equal to plain decoding's", same, "=", len(plain), ",d"),
    ]


if __name__ == "__main__":
    typer.run(main)
