"""The portable target against the reference on a CPU in fp32: max|a - b| / max|b| of the logits.

The reference in fp64 is the more accurate side. The reference in fp32 is measured against it as
well: the noise that fp32 arithmetic has by itself. Oracles' logits, which other libraries wrote,
are compared with the reference at the end.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import Report as Progress
from tercel.cli.progress import counting_bar
from tercel.gates.problems import generate
from tercel.runtime.chat import encode, render
from tercel.runtime.tokenizer import Tokenizer
from tests.reference.vectors import TOLERANCE, read
from tests.targets.models import (
    FAMILIES,
    Session,
    expected,
    reference_in,
    tokens,
)

GOAL = 1e-5
REQUESTS = 4
"""That share the steps of the mixed batches."""

Texts = Sequence[Sequence[int]]
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Logits, and what the reference gives in fp64."""


def prefill(family: str, texts: Texts) -> Pairs:
    """Every length at once, up to the whole text."""
    text, *_ = texts
    wanted = expected(family, text)
    for length in range(1, len(text) + 1):
        logits = Session(family).step({"a": text[:length]})
        yield logits[0], wanted[length - 1]


def chunked_prefill(family: str, texts: Texts) -> Pairs:
    """Two chunks, split everywhere."""
    text, *_ = texts
    wanted = expected(family, text)
    for split in range(1, len(text)):
        session = Session(family)
        first = session.step({"a": text[:split]})
        last = session.step({"a": text[split:]})
        yield first[0], wanted[split - 1]
        yield last[0], wanted[-1]


def decode(family: str, texts: Texts) -> Pairs:
    """One request alone, from its second token on."""
    text, *_ = texts
    wanted = expected(family, text)
    session = Session(family)
    session.step({"a": text[:1]})
    for position, token in enumerate(text[1:], start=1):
        logits = session.step(decode={"a": [token]})
        yield logits[0], wanted[position]


def mixed_batches(family: str, texts: Texts) -> Pairs:
    """Requests of random ages and chunks share steps, in random order."""
    rng = random.Random(0)
    session = Session(family)
    rest = {str(name): list(text) for name, text in enumerate(texts)}
    wanted = {name: expected(family, text) for name, text in rest.items()}
    prompts = {name: rng.randint(1, len(text)) for name, text in rest.items()}
    while running := [name for name, text in rest.items() if text]:
        chunks: dict[str, Sequence[int]] = {}
        steps: dict[str, Sequence[int]] = {}
        for name in rng.sample(running, rng.randint(1, len(running))):
            prompt_left = prompts[name] - session.requests.get(name, 0)
            part, size = (chunks, rng.randint(1, prompt_left)) if prompt_left > 0 else (steps, 1)
            part[name], rest[name] = rest[name][:size], rest[name][size:]
        logits = session.step(chunks, steps)
        for name, row in zip([*chunks, *steps], logits, strict=True):
            yield row, wanted[name][session.requests[name] - 1]


def reference_in_fp32(family: str, texts: Texts) -> Pairs:
    model = reference_in(family, torch.float32)
    with torch.inference_mode():
        for text in texts:
            logits = model(torch.tensor([text]))[0]
            yield logits, expected(family, text)


MODES: tuple[Callable[[str, Texts], Pairs], ...] = (
    prefill,
    chunked_prefill,
    decode,
    mixed_batches,
    reference_in_fp32,
)


def texts_of(family: str, length: int) -> Texts:
    """Worked problems where the checkpoint has a tokenizer, else random tokens."""
    if family in FAMILIES:
        return [tokens(length, seed, family) for seed in range(REQUESTS)]
    tokenizer = Tokenizer.load(Path(family))
    texts = []
    for problem in islice(generate(seed=5), REQUESTS):
        reply = {
            "role": "assistant",
            "reasoning_content": problem.thinking,
            "content": f"The answer is {problem.answer}.",
        }
        messages = [{"role": "user", "content": problem.question}, reply]
        texts.append(encode(tokenizer, render(messages, add_generation_prompt=False))[-length:])
    return texts


def relative_error(pairs: Pairs) -> float:
    """max|a - b| / max|b|, each over everything that a mode gives."""
    largest = [((a - b).abs().max(), b.abs().max()) for a, b in pairs]
    errors, sizes = torch.tensor(largest, dtype=torch.float64).unbind(1)
    return float(errors.max() / sizes.max())


def portable_target(families: Sequence[str], length: int, progress: Progress) -> Iterator[Figure]:
    for done, (family, mode) in enumerate((f, m) for f in families for m in MODES):
        progress(done, len(families) * len(MODES))
        error = relative_error(mode(family, texts_of(family, length)))
        name = f"{Path(family).name}: {mode.__name__.replace('_', ' ')}"
        goal = None if mode is reference_in_fp32 else GOAL
        yield Figure(name, error, "<=", goal, ".1e")


def oracles() -> Iterator[Figure]:
    libraries = {"kimi_k3": "mlx-lm", "kimi_linear": "transformers"}
    for name, limit in TOLERANCE.items():
        vector = read(name)
        logits = vector.run()
        equal = (logits.argmax(-1) == vector.logits.argmax(-1)).double().mean()
        against = f"reference against {libraries[name]} ({name})"
        yield Figure(f"{against}", vector.error(logits), "<=", limit, ".1e")
        yield Figure(f"{against}: equal argmax", float(equal), "=", 1.0, ".0%")


def main(
    model: Model = NANO,
    length: Annotated[int, typer.Option(min=2, max=100, help="Tokens of each text.")] = 64,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: Json = False,
) -> None:
    """The portable target against the reference, on random checkpoints and a trained one."""
    torch.set_num_threads(threads)
    with counting_bar("Parity") as progress:
        figures = (*portable_target([*FAMILIES, str(model)], length, progress), *oracles())
    settings = {"tokens": length, "requests in mixed batches": REQUESTS, "threads": threads}
    title = "Portable target against the reference, fp32: largest relative error of the logits"
    publish(Report(title, figures, settings), as_json)


if __name__ == "__main__":
    typer.run(main)
